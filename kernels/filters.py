"""What a top-k, and top-p and min-p after it, keep of a row's logits, and the best score among it.

Nothing below a bound can be kept: the k-th largest of the maxima of short runs of columns, or what min-p allows. The columns above it
are gathered from the runs that reach it, and the cut is searched among them. Rows without a top-k: `kernels.trials`.
"""

import triton
import triton.language as tl

from kernels.noise import noisy_block
from kernels.search import BLOCK, find_cut, gather, kth_largest_bound, logit_of, order_key, write_hits


@triton.jit
def is_ranked(top_k, columns):
    return (top_k > 0) & (top_k < columns)


@triton.jit
def choose_ranked(
    row_ptr, maxima_ptr, hits_ptr, ids_ptr, gathered_ptr, largest, temperature, top_k, top_p, min_p, seed, position,
    first, columns, runs, RUN: tl.constexpr, RUNS_BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The column of the best score among what the filters keep, top_k among them.

    maxima_ptr: the largest logit of each run of RUN columns, that of all is `largest` and finite. hits_ptr, ids_ptr and gathered_ptr: room
    for a number a run, ROOM ids and ROOM logits.
    """
    fails, holds, hits = _bounds(maxima_ptr, hits_ptr, largest, temperature, top_k, top_p, min_p, runs, RUNS_BLOCK)
    found = gather(row_ptr, hits_ptr, hits, ids_ptr, gathered_ptr, tl.full([], 0, tl.int32), fails, holds, columns, RUN, ROOM)
    if found <= ROOM:
        winner = _choose(
            gathered_ptr, row_ptr, hits_ptr, ids_ptr, gathered_ptr, found, hits, found, fails, holds, largest, temperature,
            top_k, top_p, min_p, seed, position, first, columns, True, RUN, ROOM,
        )  # fmt: skip
    else:
        winner = _choose(
            row_ptr, row_ptr, hits_ptr, ids_ptr, gathered_ptr, columns, hits, found, fails, holds, largest, temperature,
            top_k, top_p, min_p, seed, position, first, columns, False, RUN, ROOM,
        )  # fmt: skip
    return winner


@triton.jit
def _bounds(maxima_ptr, hits_ptr, largest, temperature, top_k, top_p, min_p, runs, RUNS_BLOCK: tl.constexpr):
    """Keys that nothing kept is at or below and above, and how many runs reach beyond the first."""
    run = tl.arange(0, RUNS_BLOCK)
    maxima = tl.load(maxima_ptr + run, mask=run < runs, other=float("-inf"))
    low = tl.full([], float("-inf"), tl.float32)
    if top_k <= runs:  # as many runs, so as many logits, reach the k-th largest of their maxima
        low = kth_largest_bound(order_key(maxima), top_k)
    if (min_p > 0) & (top_p >= 1):  # with top_p, what min_p drops still counts in the mass
        low = tl.maximum(low, largest + temperature * (tl.log(min_p) - 1e-3))
    fails = tl.maximum(order_key(low).to(tl.int64) - 1, order_key(tl.full([], float("-inf"), tl.float32)).to(tl.int64))
    holds = order_key(largest).to(tl.int64)
    hits = write_hits(hits_ptr, run, (maxima >= low) & (run < runs))
    return fails, holds, hits


@triton.jit
def _choose(
    source_ptr, row_ptr, hits_ptr, ids_ptr, gathered_ptr, count, hits, found, fails, holds, largest, temperature,
    top_k, top_p, min_p, seed, position, first, columns, GATHERED: tl.constexpr, RUN: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Of `count` logits from source_ptr: all that can be kept, gathered, or the whole row. `found`: how many have keys in between."""
    limit = tl.full([], float("inf"), tl.float32)
    cut, above, mass_above, equal = find_cut(
        source_ptr, row_ptr, hits_ptr, ids_ptr, gathered_ptr, count, hits, found, fails, holds, largest, temperature, top_k, limit,
        columns, GATHERED, RUN, ROOM,
    )  # fmt: skip
    if top_p < 1:
        limit = top_p * (mass_above + tl.minimum(top_k - above, equal) * tl.exp((logit_of(cut) - largest) / temperature))
        cut, above, mass_above, equal = find_cut(
            source_ptr, row_ptr, hits_ptr, ids_ptr, gathered_ptr, count, hits, found, fails, holds, largest, temperature, top_k, limit,
            columns, GATHERED, RUN, ROOM,
        )  # fmt: skip

    equal_mass = tl.exp((logit_of(cut) - largest) / temperature)
    least = tl.minimum(min_p, 1.0)
    best = tl.full([], float("-inf"), tl.float32)
    winner = tl.full([], 0, tl.int32)
    equal_before = tl.full([], 0, tl.int32)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        logits = tl.load(source_ptr + index, mask=index < count, other=float("-inf")).to(tl.float32)
        keys = order_key(logits)
        kept = keys > cut
        is_equal = (keys == cut).to(tl.int32)
        if tl.sum(is_equal, axis=0) > 0:
            rank = above + equal_before + tl.cumsum(is_equal, axis=0) - is_equal
            rank_mass = mass_above + (rank - above) * equal_mass
            kept |= (is_equal > 0) & (rank < top_k) & ((rank_mass < limit) | (rank == 0))
            equal_before += tl.sum(is_equal, axis=0)
        kept &= (tl.exp((logits - largest) / temperature) >= least) & (index < count)
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            column = tl.load(ids_ptr + index, mask=index < count, other=0) if GATHERED else index
            score = tl.where(kept, noisy_block(logits, temperature, seed, position, first + column), float("-inf"))
            block_best, place = tl.max(score, axis=0, return_indices=True)
            if block_best > best:
                best = block_best
                winner = tl.sum(tl.where(index == start + place, column, 0), axis=0)
    return winner
