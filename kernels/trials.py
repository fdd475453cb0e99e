"""The best score among what top-p and min-p keep of a row, by trial: neither needs to know where they cut.

What they keep is a prefix of the columns ordered by (logit descending, column ascending). If the column of the best score of all is in it,
that is the answer; else the prefix ends before that column, and the best score before it is the next trial. Whether top-p keeps a column
takes the mass before it in the order: one pass over the row, without noise, or none where a bound tells. Min-p needs no pass.

That mass is as good as uniform, so top-p keeps the first trial with a probability of top_p, and a row with a pass for each takes
1 + log(1 / top_p) in the mean, however flat its logits are. The first pass of a row is shared by many programs. One goes on by itself with
the rows whose first trial was dropped, a tenth of them with a top_p of 0.9; one row in 200 of these settings takes more than one pass more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.filters import choose_ranked
from kernels.launch import next_power_of_2, pdl_options
from kernels.noise import noisy_block
from kernels.search import LOG2_E, ROOM, WARPS

# What is left to do of a row: nothing; to see whether its first trial is kept; to cut it with a top-k.
SETTLED, OPEN, RANKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Rows of one tensor, each a batch long: a kernel would be compiled once for those that begin at a multiple of 16 bytes and once for others.
ASKED = ("top_k_ptr", "top_p_ptr", "min_p_ptr")
SHARES = 16  # of a row's columns; never by batch: a row's sums must depend on that row only
SHARE_BLOCK, SHARE_WARPS, SHARE_STAGES = 2048, 4, 1
WHOLE_BLOCK, WHOLE_STAGES = 8192, 3  # of a program alone with its row, and mostly with its multiprocessor


@triton.jit
def best_column(
    row_ptr, bounds, end_logit, end_column, largest, least, noisy, temperature, seed, position, first, columns, TILE: tl.constexpr
):  # fmt: skip
    """The column of the best score, the lowest of equals, strictly before (end_logit, end_column) in the order; 0 if all are -inf.

    bounds: what the scores of each tile are at most, a block. least: a column's mass must be, where that of the logit `largest` is 1.
    noisy: else the scores are the logits of all columns.
    """
    best, winner = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    slack = tl.full([], 0.0, tl.float32)
    number = tl.arange(0, bounds.shape[0])
    bound, tile = tl.max(bounds, axis=0, return_indices=True)
    while bound > best - slack:
        column = tile * TILE + tl.arange(0, TILE)
        logits = tl.load(row_ptr + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        scores = logits
        if noisy:
            kept = (logits > end_logit) | ((logits == end_logit) & (column < end_column))
            kept &= tl.exp((logits - largest) / temperature) >= least
            scores = tl.where(kept, noisy_block(logits, temperature, seed, position, first + column), float("-inf"))
        tile_best = tl.max(scores, axis=0)
        tile_winner = tl.min(tl.where(scores == tile_best, column, 2**30), axis=0)
        if (tile_best > best) | ((tile_best == best) & (tile_winner < winner)):
            best, winner = tile_best, tile_winner
            if noisy:
                slack = 1e-3 + 2e-6 * tl.abs(best)  # bounds and scores are rounded
        bounds = tl.where(number == tile, float("-inf"), bounds)
        bound, tile = tl.max(bounds, axis=0, return_indices=True)
    return winner


@triton.jit
def tile_masses(tops, masses, largest, temperature):
    """Relative to the row's largest logit, from those relative to each tile's."""
    return masses * tl.exp((tops - largest) / temperature)


@triton.jit
def most_before(tops, masses, logit, largest, temperature):
    """At least the mass before a column of this logit: that of the tiles that reach it, without its own."""
    return tl.sum(tl.where(tops >= logit, masses, 0.0), axis=0) - tl.exp((logit - largest) / temperature)


@triton.jit
def _mass_before(row_ptr, begin, end, logit, column, largest, temperature, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Of the columns from `begin` to `end` that lie strictly before (logit, column) in the order."""
    masses = tl.zeros([BLOCK], tl.float32)
    factor = LOG2_E / temperature
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + columns, mask=columns < end, other=float("-inf")).to(tl.float32)
        before = (logits > logit) | ((logits == logit) & (columns < column))
        masses += tl.where(before, tl.exp2((logits - largest) * factor), 0.0)
    return tl.sum(masses, axis=0)


def settle(
    logits: Tensor,
    ids: Tensor,
    flags: Tensor,
    totals: Tensor,
    scanned: tuple[Tensor, Tensor, Tensor, Tensor],
    parameters: tuple[Tensor | None, ...],
    first: int,
    tile: int,
    run: int,
) -> None:
    """Two launches for the rows whose flag is OPEN, where ids hold the first trial, or RANKED.

    totals `[B, 2]`: a row's largest logit and mass; scanned: bounds, tops and masses `[B, tiles]` of tiles, maxima `[B, runs]`;
    parameters: those of `kernels.sampling.sample`; tile, run: their columns.
    """
    (rows, columns), stride, pdl = logits.shape, logits.stride(0), pdl_options(logits.device)
    before, maxima = totals.new_empty(rows, SHARES), scanned[-1]
    tiles, runs = scanned[0].shape[1], maxima.shape[1]
    hits, gathered = torch.empty_like(maxima, dtype=torch.int32), totals.new_empty(rows, ROOM)
    _weigh_kernel[(SHARES, rows)](
        logits, ids, flags, totals, before, parameters[0], first, columns, stride,
        SHARES, SHARE_BLOCK, SHARE_STAGES, num_warps=SHARE_WARPS, **pdl,
    )  # fmt: skip
    _settle_kernel[(rows,)](
        logits, ids, flags, totals, before, *scanned, hits, torch.empty_like(gathered, dtype=torch.int32), gathered, *parameters,
        first, columns, stride, tiles, runs, SHARES, WHOLE_BLOCK, WHOLE_STAGES, tile, next_power_of_2(tiles),
        run, next_power_of_2(runs), ROOM, num_warps=WARPS, **pdl,
    )  # fmt: skip


@triton.jit
def _weigh_kernel(
    logits_ptr, ids_ptr, flags_ptr, totals_ptr, before_ptr, temperature_ptr, first, columns, row_stride,
    SHARES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The mass before a row's first trial, by shares of its columns."""
    share, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    flag, column, largest = tl.load(flags_ptr + row), tl.load(ids_ptr + row) - first, tl.load(totals_ptr + row * 2)
    temperature = tl.load(temperature_ptr + row)
    if flag == OPEN:
        row_ptr, size = logits_ptr + row * row_stride, tl.cdiv(columns, SHARES * 128) * 128
        begin, end = share * size, tl.minimum((share + 1) * size, columns)
        logit = tl.load(row_ptr + column).to(tl.float32)
        mass = _mass_before(row_ptr, begin, end, logit, column, largest, temperature, BLOCK, STAGES)
        tl.store(before_ptr + row * SHARES + share, mass)


@triton.jit(do_not_specialize_on_alignment=ASKED)
def _settle_kernel(
    logits_ptr, ids_ptr, flags_ptr, totals_ptr, before_ptr, bounds_ptr, tops_ptr, masses_ptr, maxima_ptr, hits_ptr, gathered_ids_ptr,
    gathered_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, first, columns, row_stride,
    tiles, runs, SHARES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr,
    TILES_BLOCK: tl.constexpr, RUN: tl.constexpr, RUNS_BLOCK: tl.constexpr, ROOM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    flag = tl.load(flags_ptr + row)
    if flag != SETTLED:
        temperature, top_p, min_p = tl.load(temperature_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        row_ptr, largest = logits_ptr + row * row_stride, tl.load(totals_ptr + row * 2)
        if flag == OPEN:
            tile = tl.arange(0, TILES_BLOCK)
            bounds = tl.load(bounds_ptr + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
            tops = tl.load(tops_ptr + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
            masses = tl.load(masses_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
            masses = tile_masses(tops, masses, largest, temperature)
            limit, least = top_p * tl.load(totals_ptr + row * 2 + 1), tl.minimum(min_p, 1.0)
            winner = tl.load(ids_ptr + row) - first
            before = tl.sum(tl.load(before_ptr + row * SHARES + tl.arange(0, SHARES)), axis=0)
            while before >= limit:
                logit = tl.load(row_ptr + winner).to(tl.float32)
                bounds = tl.where(tops >= logit, bounds, float("-inf"))
                winner = best_column(
                    row_ptr, bounds, logit, winner, largest, least, True, temperature, seed, position, first, columns, TILE
                )
                logit = tl.load(row_ptr + winner).to(tl.float32)
                before = most_before(tops, masses, logit, largest, temperature)
                if before >= limit:
                    before = _mass_before(row_ptr, 0, columns, logit, winner, largest, temperature, BLOCK, STAGES)
        else:
            winner = choose_ranked(
                row_ptr, maxima_ptr + row * runs, hits_ptr + row * runs, gathered_ids_ptr + row * ROOM, gathered_ptr + row * ROOM,
                largest, temperature, tl.load(top_k_ptr + row), top_p, min_p, seed, position, first, columns, runs, RUN,
                RUNS_BLOCK, ROOM,
            )  # fmt: skip
        tl.store(ids_ptr + row, first + winner)
