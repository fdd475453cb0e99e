"""The next token of every row. B rows, V columns of logits: the vocabulary ids from `first` on.

On a GPU no row is sorted. The noise makes sampling an argmax, so one pass over the logits serves greedy and unfiltered rows; how
filtered rows are cut stands in `kernels.filters`. The host decides nothing: what a row asks for is read on the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.filters import choose_filtered, choose_gathered, is_filtered
from kernels.flat_rows import FLAG, FLOATS, LIST, PLAN, SETTLED, plan_flat_row, settle_flat_rows
from kernels.launch import cdiv, next_power_of_2, pdl_options
from kernels.noise import gumbel, gumbel_block
from kernels.search import ROOM, WARPS

GREEDY_BELOW = tl.constexpr(1e-5)  # temperature under which a row is greedy: dividing by less overflows float32
FAILED = tl.constexpr(-2)  # the id of a row whose logits hold a NaN
TILE = 1024  # columns of a program of the first pass; never by batch: a row's sums must depend on that row only
RUN = 128  # columns of which the first pass keeps a maximum
SHARED_ROWS = False  # whether rows of flat logits are shared among programs: see `kernels.flat_rows`


def greedy(logits: Tensor) -> Tensor:
    """logits `[B, V]`, float32, float16 or bfloat16 -> `[B]` int32: the column of the largest, the lowest of equals.

    -2 for a row with a NaN.
    """
    return greedy_triton(logits) if logits.is_cuda else greedy_torch(logits)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first: int = 0,
    slots: Tensor | None = None,
) -> Tensor:
    """logits `[B, V]`, float32, float16 or bfloat16; temperature, top_p, min_p float32, top_k int32, seeds int64, `[B]` or, where
    slots `[B]` are given, `[S]` by slot; positions `[B]` int32 -> ids `[B]` int32.

    Each filter keeps a prefix of the ids ordered by (logit descending, id ascending): the first `top_k` (0 or less: all); of
    these, renormalised, up to and including the one that crosses `top_p` (at least the first); those of probability at least
    `min_p` times the largest. Then `argmax(logit / temperature + noise)` over the ids kept, the noise a function of (seed,
    position, id) alone. Temperature 0 (below 1e-5) is greedy. A row with a NaN gives -2. A row's id depends on that row only.
    """
    implementation = sample_triton if logits.is_cuda else sample_torch
    return implementation(logits, temperature, top_k, top_p, min_p, seeds, positions, first, slots)


def greedy_torch(logits: Tensor) -> Tensor:
    # max takes a NaN for the largest and the first of equals, so the NaN check is one element a row.
    values, ids = logits.max(dim=-1)
    return ids.int().masked_fill_(values.isnan(), FAILED.value)


def sample_torch(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first: int = 0,
    slots: Tensor | None = None,
) -> Tensor:
    if slots is not None:
        temperature, top_k, top_p, min_p, seeds = (each[slots.long()] for each in (temperature, top_k, top_p, min_p, seeds))
    logits = logits.float()
    random = temperature >= GREEDY_BELOW.value
    scaled = logits / temperature.where(random, 1.0)[:, None]
    filtered = random & (((top_k > 0) & (top_k < logits.shape[1])) | (top_p < 1) | (min_p > 0))
    if bool(filtered.any()):
        dropped = ~kept(logits[filtered], temperature[filtered], top_k[filtered], top_p[filtered], min_p[filtered])
        scaled[filtered] = scaled[filtered].masked_fill_(dropped, -torch.inf)
    if bool(random.any()):
        ids = torch.arange(first, first + logits.shape[1], device=logits.device)
        scaled[random] += gumbel(seeds[random], positions[random], ids)
    failed = logits.isnan().any(dim=1)
    return (greedy_torch(scaled) + first).masked_fill_(failed, FAILED.value)


def kept(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which columns the filters of `sample` keep: `[B, V]` bool; equal logits in the order of their columns."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    scaled = (ordered - ordered[:, :1]) / temperature[:, None]
    rank = torch.arange(logits.shape[1], device=logits.device)
    keep = (rank < top_k[:, None]) | (top_k <= 0)[:, None]
    probability = scaled.masked_fill(~keep, -torch.inf).softmax(dim=-1)
    before = probability.cumsum(dim=-1) - probability
    keep &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    keep &= scaled.exp() >= min_p[:, None]
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter_(1, order, keep)


def greedy_triton(logits: Tensor) -> Tensor:
    return _launch(logits, None, None, None, None, None, None, 0, None)


def sample_triton(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first: int = 0,
    slots: Tensor | None = None,
    shared: bool = SHARED_ROWS,
) -> Tensor:
    return _launch(logits, temperature, top_k, top_p, min_p, seeds, positions, first, slots, shared)


def _launch(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    first: int,
    slots: Tensor | None,
    shared: bool = False,
) -> Tensor:
    (rows, columns), device = logits.shape, logits.device
    ids = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return ids
    tiles, random = cdiv(columns, TILE), temperature is not None
    runs = tiles * (TILE // RUN) if random else 0
    scores, masses = torch.empty(2, rows, tiles, dtype=torch.float32, device=device)
    winners = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    maxima = torch.empty(rows, runs, dtype=torch.float32, device=device)
    hits = torch.empty(rows, runs, dtype=torch.int32, device=device)
    gathered = torch.empty(rows, ROOM if random else 0, dtype=torch.float32, device=device)
    gathered_ids = torch.empty_like(gathered, dtype=torch.int32)
    plan = torch.empty(rows, PLAN if shared else 0, dtype=torch.int64, device=device)
    floats = torch.empty(rows, FLOATS if shared else 0, dtype=torch.float32, device=device)
    listed = torch.empty(rows if shared else 0, dtype=torch.int32, device=device)
    parameters = (temperature, top_k, top_p, min_p, seeds, positions, slots)
    _scan_kernel[(tiles, rows)](
        logits, scores, masses, winners, maxima, *parameters, first, columns, logits.stride(0), tiles, random, slots is not None,
        TILE, RUN, num_warps=4, **pdl_options(device),
    )  # fmt: skip
    _choose_kernel[(rows,)](
        logits, scores, masses, winners, maxima, hits, gathered_ids, gathered, ids, plan, floats, listed, *parameters,
        first, columns, logits.stride(0), tiles, runs, random, slots is not None, next_power_of_2(tiles), RUN,
        next_power_of_2(runs), ROOM, shared, LIST, PLAN, FLOATS, num_warps=WARPS if random else 4, **pdl_options(device),
    )  # fmt: skip
    if shared:
        scratch, search = (maxima, hits, gathered_ids, gathered), (runs, RUN, next_power_of_2(runs), ROOM)
        settle_flat_rows(logits, ids, plan, floats, listed, scratch, parameters, first, search)
    return ids


@triton.jit
def _scan_kernel(
    logits_ptr, scores_ptr, masses_ptr, winners_ptr, maxima_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, slots_ptr, first, columns, row_stride, tiles,
    RANDOM: tl.constexpr, BY_SLOT: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a tile, for filtered rows: its largest logit and its softmax denominator; for others: its best score and where."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    column = tile * TILE + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + row * row_stride + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    failed = tl.max((logits != logits).to(tl.int32), axis=0) > 0
    scores = logits
    place = row * tiles + tile
    if RANDOM:
        slot = tl.load(slots_ptr + row) if BY_SLOT else row
        temperature = tl.load(temperature_ptr + slot)
        if temperature >= GREEDY_BELOW:
            top_k, top_p, min_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
            if is_filtered(top_k, top_p, min_p, columns):
                largest = tl.max(logits, axis=0)
                exponent = tl.where(logits > float("-inf"), (logits - largest) / temperature, float("-inf"))
                tl.store(masses_ptr + place, tl.sum(tl.exp(exponent), axis=0))
                RUNS: tl.constexpr = TILE // RUN
                maxima = tl.max(tl.reshape(logits, [RUNS, RUN]), axis=1)
                tl.store(maxima_ptr + place * RUNS + tl.arange(0, RUNS), maxima)
            else:
                scores = logits / temperature + gumbel_block(tl.load(seeds_ptr + slot), tl.load(positions_ptr + row), first + column)
    best, winner = tl.max(scores, axis=0, return_indices=True)
    tl.store(scores_ptr + place, best)
    tl.store(winners_ptr + place, tl.where(failed, FAILED, tile * TILE + winner))


@triton.jit
def _choose_kernel(
    logits_ptr, scores_ptr, masses_ptr, winners_ptr, maxima_ptr, hits_ptr, gathered_ids_ptr, gathered_ptr, ids_ptr,
    plan_ptr, floats_ptr, listed_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, slots_ptr,
    first, columns, row_stride, tiles, runs, RANDOM: tl.constexpr, BY_SLOT: tl.constexpr, TILES_BLOCK: tl.constexpr, RUN: tl.constexpr,
    RUNS_BLOCK: tl.constexpr, ROOM: tl.constexpr, SHARED_ROWS: tl.constexpr, LIST: tl.constexpr, PLAN: tl.constexpr, FLOATS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The best of a row's tiles; for filtered rows, of what the filters keep."""
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.arange(0, TILES_BLOCK)
    scores = tl.load(scores_ptr + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    winners = tl.load(winners_ptr + row * tiles + tile, mask=tile < tiles, other=0)
    failed = tl.min(winners, axis=0) < 0
    largest, best_tile = tl.max(scores, axis=0, return_indices=True)
    winner = tl.sum(tl.where(tile == best_tile, winners, 0), axis=0)
    if SHARED_ROWS:
        tl.store(plan_ptr + row * PLAN + FLAG, SETTLED)
    if RANDOM:
        slot = tl.load(slots_ptr + row) if BY_SLOT else row
        temperature = tl.load(temperature_ptr + slot)
        top_k, top_p, min_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
        finite = (largest > float("-inf")) & (largest < float("inf"))
        if (temperature >= GREEDY_BELOW) & is_filtered(top_k, top_p, min_p, columns) & finite:
            masses = tl.load(masses_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
            mass = tl.sum(masses * tl.exp((scores - largest) / temperature), axis=0)
            row_ptr, seed, position = logits_ptr + row * row_stride, tl.load(seeds_ptr + slot), tl.load(positions_ptr + row)
            maxima_ptr += row * runs
            hits_ptr += row * runs
            gathered_ids_ptr += row * ROOM
            gathered_ptr += row * ROOM
            if SHARED_ROWS:
                found, winner, top_k, fails, holds = choose_gathered(
                    row_ptr, maxima_ptr, hits_ptr, gathered_ids_ptr, gathered_ptr, largest, mass, temperature, top_k, top_p, min_p,
                    seed, position, first, columns, runs, RUN, RUNS_BLOCK, ROOM,
                )  # fmt: skip
                if (found > ROOM) & (failed == 0):
                    plan_flat_row(
                        plan_ptr + row * PLAN, floats_ptr + row * FLOATS, listed_ptr + row, row_ptr, fails, holds, largest, mass,
                        temperature, top_k, top_p, columns, LIST,
                    )  # fmt: skip
            else:
                winner = choose_filtered(
                    row_ptr, maxima_ptr, hits_ptr, gathered_ids_ptr, gathered_ptr, largest, mass, temperature, top_k, top_p, min_p,
                    seed, position, first, columns, runs, RUN, RUNS_BLOCK, ROOM,
                )  # fmt: skip
    tl.store(ids_ptr + row, tl.where(failed, FAILED, first + winner))
