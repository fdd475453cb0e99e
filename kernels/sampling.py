"""The next token of every row. B rows, V columns of logits: the vocabulary ids from `first` on.

On a GPU no row is sorted. The noise makes sampling an argmax, and one pass over the logits tells how good the scores of each tile of them
can be at most: the best one is looked for in those tiles only that can hold it, mostly in one. How rows are cut stands in `kernels.filters`
for those with a top-k and in `kernels.trials` for others. The host decides nothing: what a row asks for is read on the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.filters import is_ranked
from kernels.launch import cdiv, next_power_of_2, pdl_options
from kernels.noise import GREEDY_BELOW, gumbel, gumbel_bound, uniform_block
from kernels.offers import FAILED, UNDECIDED, best_offer_torch, id_of
from kernels.search import LOG2_E
from kernels.trials import ASKED, OPEN, RANKED, SETTLED, best_column, most_before, settle, tile_masses

TILE = 2048  # columns of a program of the first pass; never by batch: a row's sums must depend on that row only
RUN = 128  # columns of which the first pass keeps a maximum
SCAN_WARPS, CHOOSE_WARPS = 4, 8


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
    offers: Tensor | None = None,
) -> Tensor:
    """logits `[B, V]`, float32, float16 or bfloat16; temperature, top_p and min_p (at most 1) float32, top_k, positions int32, seeds
    int64, `[B]` -> ids `[B]` int32.

    Each filter keeps a prefix of the ids ordered by (logit descending, id ascending): the first `top_k` (0 or less: all); of
    these, renormalised, up to and including the one that crosses `top_p` (at least the first); those of probability at least
    `min_p` times the largest. Then `argmax(logit / temperature + noise)` over the ids kept, the noise a function of (seed,
    position, id) alone. Temperature 0 (below 1e-5) is greedy. A row with a NaN gives -2. A row's id depends on that row only.

    offers `[B, T]` int64, as `kernels.offering_head` makes them: what else is asked for of a row that is decided by them does not count.
    """
    implementation = sample_triton if logits.is_cuda else sample_torch
    return implementation(logits, temperature, top_k, top_p, min_p, seeds, positions, first, offers)


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
    offers: Tensor | None = None,
) -> Tensor:
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
    ids = (greedy_torch(scaled) + first).masked_fill_(failed, FAILED.value)
    return ids if offers is None else ids.where(offers[:, 0] == UNDECIDED.value, best_offer_torch(offers))


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
    offers: Tensor | None = None,
) -> Tensor:
    return _launch(logits, temperature, top_k, top_p, min_p, seeds, positions, first, offers)


def _launch(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    first: int,
    offers: Tensor | None,
) -> Tensor:
    (rows, columns), device = logits.shape, logits.device
    ids = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return ids
    tiles, random = cdiv(columns, TILE), temperature is not None
    runs, random_rows = tiles * (TILE // RUN), rows if random else 0
    bounds, tops, masses = (torch.empty(rows, tiles, dtype=torch.float32, device=device) for _ in range(3))
    maxima = torch.empty(random_rows, runs, dtype=torch.float32, device=device)
    flags = torch.empty(random_rows, dtype=torch.int32, device=device)
    totals = torch.empty(random_rows, 2, dtype=torch.float32, device=device)
    parameters = (temperature, top_k, top_p, min_p, seeds, positions)
    offered = 0 if offers is None else offers.shape[1]
    _scan_kernel[(tiles, rows)](
        logits, bounds, tops, masses, maxima, *parameters, offers, first, columns, logits.stride(0), tiles, offered, random, offered > 0,
        TILE, RUN, num_warps=SCAN_WARPS, **pdl_options(device),
    )  # fmt: skip
    _choose_kernel[(rows,)](
        logits, bounds, tops, masses, ids, flags, totals, *parameters, offers, first, columns, logits.stride(0), tiles, offered, random,
        TILE, next_power_of_2(tiles), next_power_of_2(offered) if offered else 0, num_warps=CHOOSE_WARPS, **pdl_options(device),
    )  # fmt: skip
    if random:
        settle(logits, ids, flags, totals, (bounds, tops, masses, maxima), parameters, first, TILE, RUN)
    return ids


@triton.jit(do_not_specialize_on_alignment=ASKED)
def _scan_kernel(
    logits_ptr, bounds_ptr, tops_ptr, masses_ptr, maxima_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, offers_ptr, first, columns, row_stride, tiles, offered,
    RANDOM: tl.constexpr, OFFERED: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What a tile's scores are at most: its largest logit where rows are greedy or have a top-k, else with noise. Not of rows with offers.

    Beside it, for a top-k, the largest logits of its runs, for top-p and min-p alone its largest logit and its softmax denominator. A
    NaN makes the bound one.
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if OFFERED:  # noqa: SIM102 - one is known when this is compiled, the other is not
        if tl.load(offers_ptr + row * offered) != UNDECIDED:
            return
    if RANDOM:  # asked for together, and before the logits: no tile waits for one after the other
        temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
        top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    column = tile * TILE + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + row * row_stride + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    failed = tl.max((logits != logits).to(tl.int32), axis=0) > 0
    top = tl.max(logits, axis=0)
    bound = top
    place = row * tiles + tile
    if RANDOM:  # noqa: SIM102 - one is known when this is compiled, the other is not
        if temperature >= GREEDY_BELOW:
            if is_ranked(top_k, columns):
                RUNS: tl.constexpr = TILE // RUN
                maxima = tl.max(tl.reshape(logits, [RUNS, RUN]), axis=1)
                tl.store(maxima_ptr + place * RUNS + tl.arange(0, RUNS), maxima)
            else:
                uniform = uniform_block(seed, position, first + column)
                bound = tl.max(logits * (1 / temperature) + gumbel_bound(uniform), axis=0)
                if (top_p < 1) | (min_p > 0):
                    origin = tl.where(top > float("-inf"), top, 0.0)
                    tl.store(tops_ptr + place, top)
                    tl.store(masses_ptr + place, tl.sum(tl.exp2((logits - origin) * (LOG2_E / temperature)), axis=0))
    tl.store(bounds_ptr + place, tl.where(failed, float("nan"), bound))


@triton.jit(do_not_specialize_on_alignment=ASKED)
def _choose_kernel(
    logits_ptr, bounds_ptr, tops_ptr, masses_ptr, ids_ptr, flags_ptr, totals_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, offers_ptr, first, columns, row_stride, tiles, offered,
    RANDOM: tl.constexpr, TILE: tl.constexpr, TILES_BLOCK: tl.constexpr, OFFERS_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best offer of a row that has them, else its best score; where top-p may drop its column, that is the first trial.

    Rows with a top-k are left as they are.
    """
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if RANDOM:
        temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
        top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
    if OFFERS_BLOCK:
        offer_ptr = offers_ptr + row * offered
        if tl.load(offer_ptr) != UNDECIDED:
            number = tl.arange(0, OFFERS_BLOCK)
            best = tl.max(tl.load(offer_ptr + number, mask=number < offered, other=UNDECIDED), axis=0)
            tl.store(ids_ptr + row, id_of(best))
            if RANDOM:
                tl.store(flags_ptr + row, SETTLED)
            return
    tile = tl.arange(0, TILES_BLOCK)
    place = row * tiles + tile
    bounds = tl.load(bounds_ptr + place, mask=tile < tiles, other=float("-inf"))
    failed = tl.max((bounds != bounds).to(tl.int32), axis=0) > 0
    bounds = tl.where(failed, float("-inf"), bounds)  # nothing to look for
    row_ptr = logits_ptr + row * row_stride
    if RANDOM:
        noisy = temperature >= GREEDY_BELOW
        ranked = noisy & is_ranked(top_k, columns)
        tried = noisy & ((top_p < 1) | (min_p > 0)) & (ranked == 0)
        scanned = tile < tl.where(tried, tiles, 0)
        tops = tl.where(ranked, bounds, tl.load(tops_ptr + place, mask=scanned, other=float("-inf")))
        largest = tl.max(tops, axis=0)
        cut = _is_finite(largest / temperature)  # else there is nothing to cut, or no way to tell where
        masses = tile_masses(tops, tl.load(masses_ptr + place, mask=scanned, other=0.0), largest, temperature)
        mass = tl.sum(masses, axis=0)
        tl.store(totals_ptr + row * 2, largest)
        tl.store(totals_ptr + row * 2 + 1, mass)
        winner, flag = tl.full([], 0, tl.int32), tl.full([], RANKED, tl.int32)
        if not (ranked & cut):
            limit = tl.where(cut & (top_p < 1), top_p * mass, float("inf"))
            noisy &= limit > 1  # else the largest logit alone reaches it
            winner = best_column(
                row_ptr, tl.where(limit > 1, bounds, tops), float("-inf"), columns, tl.where(cut, largest, 0.0),
                tl.where(cut, tl.minimum(min_p, 1.0), 0.0), noisy, temperature, seed, position, first, columns, TILE,
            )  # fmt: skip
            most = most_before(tops, masses, tl.load(row_ptr + winner).to(tl.float32), largest, temperature)
            flag = tl.where(noisy & cut & (most >= limit), OPEN, SETTLED)
        tl.store(flags_ptr + row, tl.where(failed, SETTLED, flag))
    else:
        winner = best_column(row_ptr, bounds, float("-inf"), columns, 0.0, 0.0, False, 1.0, 0, 0, first, columns, TILE)
    tl.store(ids_ptr + row, tl.where(failed, FAILED, first + winner))


@triton.jit
def _is_finite(x):
    return (x > float("-inf")) & (x < float("inf"))
