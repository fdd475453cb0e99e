"""What top-k, top-p and min-p keep of a row's logits, and the best score among it: the parts of `kernels.sampling` that need no sort.

Nothing below a bound can be kept: the k-th largest of the maxima of short runs of columns, a top-p tail that all columns together
cannot fill, min-p itself. The columns above it are gathered from the runs that reach it. The cut is then found by comparing with
PIVOTS logits at a time: among the gathered columns or, where they are more than there is room for, among all of them until those
between two pivots fit. A row is one program's; every sum has one order.
"""

import triton
import triton.language as tl

from kernels.noise import gumbel_block

PIVOTS = tl.constexpr(8)  # 16 spill at WARPS warps
ROOM = 2048  # for the gathered columns of a row
WARPS = 16  # of the program: one number for all batches, since the order of sums hangs on it
LANES = tl.constexpr(32 * WARPS)
WIDTH = tl.constexpr(4)  # columns of a thread
BLOCK = tl.constexpr(32 * WARPS * 4)


@triton.jit
def is_filtered(top_k, top_p, min_p, columns):
    return ((top_k > 0) & (top_k < columns)) | (top_p < 1) | (min_p > 0)


@triton.jit
def choose_filtered(
    row_ptr, maxima_ptr, hits_ptr, ids_ptr, gathered_ptr, largest, mass, temperature, top_k, top_p, min_p, seed, position,
    first, columns, runs, RUN: tl.constexpr, RUNS_BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The column of the best score among what the filters keep.

    maxima_ptr: the largest logit of each run of RUN columns; mass: of the row, relative to its largest logit, which is finite.
    hits_ptr, ids_ptr and gathered_ptr: room for a number a run, ROOM ids and ROOM logits.
    """
    top_k = tl.where(top_k > 0, tl.minimum(top_k, columns), columns)
    run = tl.arange(0, RUNS_BLOCK)
    maxima = tl.load(maxima_ptr + run, mask=run < runs, other=float("-inf"))
    low = tl.full([], float("-inf"), tl.float32)
    if top_k <= runs:  # as many runs, so as many logits, reach the k-th largest of their maxima
        low = _kth_largest_bound(_order_key(maxima), top_k)
    elif (top_k == columns) & (top_p < 1):  # all ids below this share of 1 - top_p together cannot reach 1 - top_p
        low = largest + temperature * tl.log((1 - top_p) * mass / columns * 0.5)
    if (min_p > 0) & (top_p >= 1):  # with top_p, what min_p drops still counts in the mass
        low = tl.maximum(low, largest + temperature * (tl.log(min_p) - 1e-3))
    fails = tl.maximum(_order_key(low).to(tl.int64) - 1, _order_key(tl.full([], float("-inf"), tl.float32)).to(tl.int64))
    holds = _order_key(largest).to(tl.int64)

    hit = (maxima >= low) & (run < runs)
    tl.store(hits_ptr + tl.cumsum(hit.to(tl.int32), axis=0) - 1, run, mask=hit)
    tl.debug_barrier()  # other threads read what was stored
    hits = tl.sum(hit.to(tl.int32), axis=0)
    found = _gather(row_ptr, hits_ptr, hits, ids_ptr, gathered_ptr, fails, holds, columns, RUN, ROOM)
    if found <= ROOM:
        winner = _choose(
            gathered_ptr, row_ptr, hits_ptr, ids_ptr, gathered_ptr, found, hits, found, fails, holds, largest, mass, temperature,
            top_k, top_p, min_p, seed, position, first, columns, True, RUN, ROOM,
        )  # fmt: skip
    else:
        winner = _choose(
            row_ptr, row_ptr, hits_ptr, ids_ptr, gathered_ptr, columns, hits, found, fails, holds, largest, mass, temperature,
            top_k, top_p, min_p, seed, position, first, columns, False, RUN, ROOM,
        )  # fmt: skip
    return winner


@triton.jit
def _order_key(logits):
    """int32 with the order of the logits; -0 and 0 are equal."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _logit(key):
    """Of an order key."""
    bits = key.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _kth_largest_bound(keys, k):
    """A float32 that at least k of the keys reach, k at most their number, and hardly more than k."""
    low = tl.min(keys, axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64) + 1
    reach_low = tl.full([], 2**30, tl.int32)
    while (high - low > 1) & (reach_low > k + k // 4 + 8):  # at least k reach low, fewer reach high
        step = tl.maximum((high - low) // PIVOTS, 1)
        pivots = tl.minimum(low + step * (tl.arange(0, PIVOTS) + 1), high)
        reached = tl.sum((keys[None, :] >= pivots[:, None]).to(tl.int32), axis=1)
        passed = tl.sum((reached >= k).to(tl.int32), axis=0)
        reach_low = tl.minimum(reach_low, tl.min(tl.where(reached >= k, reached, 2**30), axis=0))
        high = tl.where(passed < PIVOTS, tl.minimum(low + step * (passed + 1), high), high)
        low += step * passed
    return _logit(low)


@triton.jit
def _gather(row_ptr, hits_ptr, hits, ids_ptr, gathered_ptr, fails, holds, columns, RUN: tl.constexpr, ROOM: tl.constexpr):
    """Writes columns and logits of the keys above `fails` and up to `holds`, ascending; returns their count, also past the room."""
    found = tl.full([], 0, tl.int32)
    for start in tl.range(0, hits * RUN, BLOCK):
        index = start + tl.arange(0, BLOCK)
        column = tl.load(hits_ptr + index // RUN, mask=index // RUN < hits, other=2**23) * RUN + index % RUN
        logits = tl.load(row_ptr + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        keys = _order_key(logits)
        wanted = ((keys > fails) & (keys <= holds)).to(tl.int32)
        place = found + tl.cumsum(wanted, axis=0) - wanted
        fits = (wanted > 0) & (place < ROOM)
        tl.store(ids_ptr + place, column, mask=fits)
        tl.store(gathered_ptr + place, logits, mask=fits)
        found += tl.sum(wanted, axis=0)
    tl.debug_barrier()
    return found


@triton.jit
def _choose(
    source_ptr, row_ptr, hits_ptr, ids_ptr, gathered_ptr, count, hits, found, fails, holds, largest, mass, temperature,
    top_k, top_p, min_p, seed, position, first, columns, GATHERED: tl.constexpr, RUN: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Of `count` logits from source_ptr: all that can be kept, gathered, or the whole row. `found`: how many have keys in between."""
    limit = tl.full([], float("inf"), tl.float32)
    cut, above, mass_above, equal = holds, tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float32), found
    if (top_k >= columns) & (top_p >= 1):
        cut = fails  # min-p alone: every one of them, and it is looked at below
    if top_k < columns:
        cut, above, mass_above, equal = _find_cut(
            source_ptr, row_ptr, hits_ptr, ids_ptr, gathered_ptr, count, hits, found, fails, holds, largest, temperature, top_k, limit,
            columns, GATHERED, RUN, ROOM,
        )  # fmt: skip
    if top_p < 1:
        if top_k < columns:
            mass = mass_above + tl.minimum(top_k - above, equal) * tl.exp((_logit(cut) - largest) / temperature)
        limit = top_p * mass
        cut, above, mass_above, equal = _find_cut(
            source_ptr, row_ptr, hits_ptr, ids_ptr, gathered_ptr, count, hits, found, fails, holds, largest, temperature, top_k, limit,
            columns, GATHERED, RUN, ROOM,
        )  # fmt: skip

    equal_mass = tl.exp((_logit(cut) - largest) / temperature)
    least = tl.minimum(min_p, 1.0)
    best = tl.full([], float("-inf"), tl.float32)
    winner = tl.full([], 0, tl.int32)
    equal_before = tl.full([], 0, tl.int32)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        logits = tl.load(source_ptr + index, mask=index < count, other=float("-inf")).to(tl.float32)
        keys = _order_key(logits)
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
            score = tl.where(kept, logits / temperature + gumbel_block(seed, position, first + column), float("-inf"))
            block_best, place = tl.max(score, axis=0, return_indices=True)
            if block_best > best:
                best = block_best
                winner = tl.sum(tl.where(index == start + place, column, 0), axis=0)
    return winner


@triton.jit
def _find_cut(
    source_ptr, row_ptr, hits_ptr, ids_ptr, gathered_ptr, count, hits, found, fails, holds, largest, temperature, top_k, limit,
    columns, GATHERED: tl.constexpr, RUN: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The smallest key with fewer than top_k ids, and less mass than limit, strictly above it: the key, these two, how many equal it."""
    none, no_mass = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float32)
    room = 0 if GATHERED else ROOM
    fails, holds, inside, above, mass_above = _narrow(
        source_ptr, count, fails, holds, found, none, no_mass, room, largest, temperature, top_k, limit, GATHERED
    )
    if not GATHERED:  # noqa: SIM102 - one is known when this is compiled, the other is not
        if holds - fails > 1:  # else it is found, with more equal ones than there is room for
            gathered = _gather(row_ptr, hits_ptr, hits, ids_ptr, gathered_ptr, fails, holds, columns, RUN, ROOM)
            fails, holds, inside, above, mass_above = _narrow(
                gathered_ptr, gathered, fails, holds, inside, above, mass_above, 0, largest, temperature, top_k, limit, True
            )
    return holds, above, mass_above, inside


@triton.jit
def _narrow(
    logits_ptr, count, fails, holds, inside, above, mass_above, room, largest, temperature, top_k, limit, GATHERED: tl.constexpr
):  # fmt: skip
    """Brings `fails` and `holds` together, until at most `room` keys lie above the one and up to the other, or they are neighbours.

    inside: how many these are; above and mass_above: how many lie above holds. GATHERED: the logits are those in between, else all.
    """
    base, base_mass = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float32)
    if GATHERED:
        base, base_mass = above, mass_above
    while (holds - fails > 1) & (inside > room):
        pivots = _pivots(fails, holds)
        counts, masses = _above(logits_ptr, count, pivots, largest, temperature, 1 if GATHERED else 3)
        counts += base
        masses += base_mass
        failed = ((counts >= top_k) | (masses >= limit)) & (pivots < holds)
        above_fails = tl.minimum(above + inside, tl.min(tl.where(failed, counts, 2**30), axis=0))
        fails = tl.maximum(fails, tl.max(tl.where(failed, pivots, fails), axis=0))
        least = tl.min(tl.where(failed, holds, pivots), axis=0)  # the smallest pivot that holds, or what held before
        if least < holds:
            above = tl.max(tl.where(pivots == least, counts, 0), axis=0)
            mass_above = tl.max(tl.where(pivots == least, masses, 0.0), axis=0)
        holds = least
        inside = above_fails - above
    return fails, holds, inside, above, mass_above


@triton.jit
def _pivots(fails, holds):
    """PIVOTS keys above fails and up to holds, ascending: at even steps of the logit or, where these would take long, of the key."""
    number = tl.arange(0, PIVOTS) + 1
    low, high = _logit(fails), _logit(holds)
    even = (high - low < 1e4) & (holds - fails > 64)
    by_logit = _order_key(tl.where(even, low, 0.0) + tl.where(even, high - low, 1.0) * (number / (PIVOTS + 1)))
    by_key = fails + tl.maximum((holds - fails) // (PIVOTS + 1), 1) * number
    return tl.minimum(tl.maximum(tl.where(even, by_logit.to(tl.int64), by_key), fails + 1), holds)


@triton.jit
def _above(logits_ptr, count, pivots, largest, temperature, STAGES: tl.constexpr):
    """For each of the pivots, how many logits have a greater key, and their mass relative to the largest."""
    above = tl.zeros([PIVOTS, LANES], tl.int32)
    mass_above = tl.zeros([PIVOTS, LANES], tl.float32)
    place = tl.arange(0, WIDTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]  # what a thread adds up first is its own
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        index = start + place
        logits = tl.load(logits_ptr + index, mask=index < count, other=float("-inf")).to(tl.float32)
        is_above = _order_key(logits)[None, :, :] > pivots[:, None, None]
        above += tl.sum(is_above.to(tl.int32), axis=1)
        mass_above += tl.sum(tl.where(is_above, tl.exp((logits - largest) / temperature)[None, :, :], 0.0), axis=1)
    return tl.sum(above, axis=1), tl.sum(mass_above, axis=1)
