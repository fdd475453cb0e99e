"""The next token of every row. B rows, V columns of logits: the vocabulary ids from `first` on.

On a GPU no row is sorted. The noise makes sampling an argmax, so one pass over the logits serves greedy and unfiltered rows.
Filtered rows first get a bound below which nothing can be kept (the k-th largest of the maxima of short runs, a top-p tail that
all of V cannot fill, min-p itself); the ids above it are gathered, and the exact cut is found among them by searching the
logit's bits, a few pivots at a time. Rows with too many of them bisect over all logits: slower, with the same result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import pdl_options
from kernels.noise import gumbel, gumbel_block

GREEDY_BELOW = tl.constexpr(1e-5)  # temperature under which a row is greedy: dividing by less overflows float32
FAILED = tl.constexpr(-2)  # the id of a row whose logits hold a NaN
TILE = 1024  # columns of a program of the first pass; never by batch: a row's sums must depend on that row only
RUN = 128  # columns of which the first pass keeps a maximum
# Of one pass of a search. H200, V 151,936, top_k 20 and top_p 0.95, us for 1 and 256 rows: 74, 166; 16 with 8 warps 76, 232.
PIVOTS = tl.constexpr(8)
CANDIDATES = 8192  # room for the gathered ids of a filtered row


def greedy(logits: Tensor) -> Tensor:
    """logits `[B, V]` float32 -> `[B]` int32: the column of the largest logit, the lowest of equals; -2 for a row with a NaN."""
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
) -> Tensor:
    """logits `[B, V]`, temperature, top_p, min_p `[B]` float32, top_k, positions `[B]` int32, seeds `[B]` int64 -> ids `[B]` int32.

    Each filter keeps a prefix of the ids ordered by (logit descending, id ascending): the first `top_k` (0 or less: all); of
    these, renormalised, up to and including the one that crosses `top_p` (at least the first); those of probability at least
    `min_p` times the largest. Then `argmax(logit / temperature + noise)` over the ids kept, the noise a function of (seed,
    position, id) alone. Temperature 0 (below 1e-5) is greedy. A row with a NaN gives -2. A row's id depends on that row only.
    """
    implementation = sample_triton if logits.is_cuda else sample_torch
    return implementation(logits, temperature, top_k, top_p, min_p, seeds, positions, first)


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
) -> Tensor:
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
    return _launch(logits, None, None, None, None, None, None, 0)


def sample_triton(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first: int = 0,
) -> Tensor:
    return _launch(logits, temperature, top_k, top_p, min_p, seeds, positions, first)


def _launch(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    first: int,
) -> Tensor:
    (rows, columns), device = logits.shape, logits.device
    ids = torch.empty(rows, dtype=torch.int32, device=device)
    if rows == 0:
        return ids
    tiles, random = triton.cdiv(columns, TILE), temperature is not None
    scores, masses = torch.empty(2, rows, tiles, dtype=torch.float32, device=device)
    winners = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    maxima = torch.empty(rows, tiles * (TILE // RUN) if random else 0, dtype=torch.float32, device=device)
    candidates = torch.empty(rows, CANDIDATES if random else 0, dtype=torch.int32, device=device)
    candidate_logits = torch.empty_like(candidates, dtype=torch.float32)
    parameters = (temperature, top_k, top_p, min_p, seeds, positions)
    _scan_kernel[(tiles, rows)](
        logits, scores, masses, winners, maxima, *parameters, first, columns, logits.stride(0), tiles, random, TILE, RUN,
        num_warps=4, **pdl_options(device),
    )  # fmt: skip
    _choose_kernel[(rows,)](
        logits, scores, masses, winners, maxima, candidates, candidate_logits, ids, *parameters,
        first, columns, logits.stride(0), tiles, random, triton.next_power_of_2(tiles), TILE, RUN, CANDIDATES,
        num_warps=4, **pdl_options(device),
    )  # fmt: skip
    return ids


@triton.jit
def _scan_kernel(
    logits_ptr, scores_ptr, masses_ptr, winners_ptr, maxima_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr,
    first, columns, row_stride, tiles, RANDOM: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a tile, for filtered rows: its largest logit and its softmax denominator; for others: its best score and where."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    column = tile * TILE + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + row * row_stride + column, mask=column < columns, other=float("-inf"))
    failed = tl.max((logits != logits).to(tl.int32), axis=0) > 0
    scores = logits
    place = row * tiles + tile
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
        if temperature >= GREEDY_BELOW:
            top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
            if _is_filtered(top_k, top_p, min_p, columns):
                largest = tl.max(logits, axis=0)
                exponent = tl.where(logits > float("-inf"), (logits - largest) / temperature, float("-inf"))
                tl.store(masses_ptr + place, tl.sum(tl.exp(exponent), axis=0))
                RUNS: tl.constexpr = TILE // RUN
                maxima = tl.max(tl.reshape(logits, [RUNS, RUN]), axis=1)
                tl.store(maxima_ptr + place * RUNS + tl.arange(0, RUNS), maxima)
            else:
                scores = logits / temperature + gumbel_block(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), first + column)
    best, winner = tl.max(scores, axis=0, return_indices=True)
    tl.store(scores_ptr + place, best)
    tl.store(winners_ptr + place, tl.where(failed, FAILED, tile * TILE + winner))


@triton.jit
def _choose_kernel(
    logits_ptr, scores_ptr, masses_ptr, winners_ptr, maxima_ptr, candidates_ptr, candidate_logits_ptr, ids_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr,
    first, columns, row_stride, tiles, RANDOM: tl.constexpr, TILES_BLOCK: tl.constexpr, TILE: tl.constexpr, RUN: tl.constexpr,
    CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best of a row's tiles; for filtered rows, the cut and the best score of what it keeps."""
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
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        if (
            (temperature >= GREEDY_BELOW)
            & _is_filtered(top_k, top_p, min_p, columns)
            & (largest > float("-inf"))
            & (largest < float("inf"))
        ):
            masses = tl.load(masses_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
            mass = tl.sum(masses * tl.exp((scores - largest) / temperature), axis=0)
            top_k = tl.where(top_k > 0, tl.minimum(top_k, columns), columns)

            low = tl.full([], float("-inf"), tl.float32)
            RUNS: tl.constexpr = TILE // RUN
            if top_k <= tiles * RUNS:  # as many runs, so as many logits, reach the k-th largest of their maxima
                low = _kth_largest(maxima_ptr + row * tiles * RUNS, tiles * RUNS, top_k, TILES_BLOCK * RUNS)
            elif (top_k == columns) & (top_p < 1):  # all ids below this share of 1 - top_p together cannot reach 1 - top_p
                low = largest + temperature * tl.log((1 - top_p) * mass / columns * 0.5)
            if (min_p > 0) & (top_p >= 1):  # with top_p, what min_p drops still counts in the mass
                low = tl.maximum(low, largest + temperature * (tl.log(min_p) - 1e-3))
            row_ptr = logits_ptr + row * row_stride
            ids_gathered_ptr, gathered_ptr = candidates_ptr + row * CANDIDATES, candidate_logits_ptr + row * CANDIDATES
            hit = (scores >= low) & (tile < tiles)
            hits_ptr = winners_ptr + row * tiles  # read above, free now
            found = _gather(row_ptr, hits_ptr, ids_gathered_ptr, gathered_ptr, tile, hit, low, columns, TILE, 4 * TILE, CANDIDATES)
            seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
            if found <= CANDIDATES:
                winner = _choose_filtered(
                    gathered_ptr, ids_gathered_ptr, found, columns, low, largest, mass, temperature, top_k, top_p, min_p, seed, position,
                    first, True, 1024,
                )  # fmt: skip
            else:
                winner = _choose_filtered(
                    row_ptr, ids_gathered_ptr, columns, columns, low, largest, mass, temperature, top_k, top_p, min_p, seed, position,
                    first, False, 1024,
                )  # fmt: skip
    tl.store(ids_ptr + row, tl.where(failed, FAILED, first + winner))


@triton.jit
def _is_filtered(top_k, top_p, min_p, columns):
    return ((top_k > 0) & (top_k < columns)) | (top_p < 1) | (min_p > 0)


@triton.jit
def _order_key(logits):
    """int32 with the order of the logits; -0 and 0 are equal."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _kth_largest(values_ptr, count, k, BLOCK: tl.constexpr):
    """The largest float32 that at least k of the values reach; k is at most count."""
    index = tl.arange(0, BLOCK)
    keys = _order_key(tl.load(values_ptr + index, mask=index < count, other=float("-inf")))
    low = tl.min(keys, axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64) + 1
    while high - low > 1:  # at least k reach low, fewer reach high
        step = tl.maximum((high - low) // PIVOTS, 1)
        pivots = tl.minimum(low + step * (tl.arange(0, PIVOTS) + 1), high)
        reached = tl.sum((keys[None, :] >= pivots[:, None]).to(tl.int32), axis=1)
        passed = tl.sum((reached >= k).to(tl.int32), axis=0)
        high = tl.where(passed < PIVOTS, tl.minimum(low + step * (passed + 1), high), high)
        low += step * passed
    bits = low.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _gather(
    row_ptr, hits_ptr, ids_ptr, gathered_ptr, tile, hit, low, columns, TILE: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr
):  # fmt: skip
    """Writes columns and logits of those that are finite and at least `low`, ascending; returns their count, also past the room.

    Looks only into the tiles that hit says; hits_ptr is room for their numbers.
    """
    hits = hit.to(tl.int32)
    tl.store(hits_ptr + tl.cumsum(hits, axis=0) - 1, tile, mask=hit)
    tl.debug_barrier()  # other threads read what was stored
    found = tl.full([], 0, tl.int32)
    for start in tl.range(0, tl.sum(hits, axis=0) * TILE, BLOCK):
        index = start + tl.arange(0, BLOCK)
        column = tl.load(hits_ptr + index // TILE, mask=index // TILE < tl.sum(hits, axis=0), other=2**20) * TILE + index % TILE
        logits = tl.load(row_ptr + column, mask=column < columns, other=float("-inf"))
        wanted = ((logits >= low) & (logits > float("-inf"))).to(tl.int32)
        place = found + tl.cumsum(wanted, axis=0) - wanted
        fits = (wanted > 0) & (place < CANDIDATES)
        tl.store(ids_ptr + place, column, mask=fits)
        tl.store(gathered_ptr + place, logits, mask=fits)
        found += tl.sum(wanted, axis=0)
    tl.debug_barrier()
    return found


@triton.jit
def _choose_filtered(
    logits_ptr, ids_ptr, count, columns, low, largest, mass, temperature, top_k, top_p, min_p, seed, position, first,
    GATHERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The column of the best score among what the filters keep of `count` logits: the gathered ones or all of the row."""
    STAGES: tl.constexpr = 1 if GATHERED else 3  # the gathered ones stay in the L1 cache, which asynchronous copies pass by
    limit = tl.full([], float("inf"), tl.float32)
    cut = _order_key(low).to(tl.int64)
    if top_k < columns:
        cut = _find_cut(logits_ptr, count, low, largest, temperature, top_k, limit, STAGES, BLOCK)
    if top_p < 1:
        if top_k < columns:
            above, mass_above, equal, value = _around(logits_ptr, count, cut, largest, temperature, STAGES, BLOCK)
            mass = mass_above + tl.minimum(top_k - above, equal) * tl.exp((value - largest) / temperature)
        limit = top_p * mass
        cut = _find_cut(logits_ptr, count, low, largest, temperature, top_k, limit, STAGES, BLOCK)

    above, mass_above, _, value = _around(logits_ptr, count, cut, largest, temperature, STAGES, BLOCK)
    cut_key = _order_key(value)
    equal_mass = tl.exp((value - largest) / temperature)
    best = tl.full([], float("-inf"), tl.float32)
    winner = tl.full([], 0, tl.int32)
    equal_before = tl.full([], 0, tl.int32)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + index, mask=index < count, other=float("-inf"))
        column = tl.load(ids_ptr + index, mask=index < count, other=0) if GATHERED else index
        keys = _order_key(logits)
        is_equal = (keys == cut_key).to(tl.int32)
        rank = above + equal_before + tl.cumsum(is_equal, axis=0) - is_equal
        rank_mass = mass_above + (rank - above) * equal_mass
        kept = (keys > cut_key) | ((is_equal > 0) & (rank < top_k) & ((rank_mass < limit) | (rank == 0)))
        kept &= tl.exp((logits - largest) / temperature) >= tl.minimum(min_p, 1.0)
        score = tl.where(kept, logits / temperature + gumbel_block(seed, position, first + column), float("-inf"))
        block_best, place = tl.max(score, axis=0, return_indices=True)
        if block_best > best:
            best = block_best
            winner = tl.sum(tl.where(index == start + place, column, 0), axis=0)
        equal_before += tl.sum(is_equal, axis=0)
    return winner


@triton.jit
def _find_cut(
    logits_ptr, count, low, largest, temperature, top_k, limit, STAGES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The smallest key with fewer than `top_k` ids, and less mass than `limit`, strictly above it."""
    fails = _order_key(low).to(tl.int64) - 1
    holds = _order_key(largest).to(tl.int64)
    while holds - fails > 1:
        step = tl.maximum((holds - fails) // PIVOTS, 1)
        pivots = tl.minimum(fails + step * (tl.arange(0, PIVOTS) + 1), holds)
        above, mass_above = _above(logits_ptr, count, pivots, largest, temperature, STAGES, BLOCK)
        failed = tl.sum((((above >= top_k) | (mass_above >= limit)) & (pivots < holds)).to(tl.int32), axis=0)
        holds = tl.where(failed < PIVOTS, tl.minimum(fails + step * (failed + 1), holds), holds)
        fails += step * failed
    return holds


@triton.jit
def _above(logits_ptr, count, pivots, largest, temperature, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    """For each of the pivots, how many logits have a greater key, and their mass relative to the largest."""
    above = tl.zeros([PIVOTS, BLOCK], tl.int32)
    mass_above = tl.zeros([PIVOTS, BLOCK], tl.float32)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        index = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + index, mask=index < count, other=float("-inf"))
        is_above = _order_key(logits)[None, :] > pivots[:, None]
        above += is_above.to(tl.int32)
        mass_above += tl.where(is_above, tl.exp((logits - largest) / temperature)[None, :], 0.0)
    return tl.sum(above, axis=1), tl.sum(mass_above, axis=1)


@triton.jit
def _around(logits_ptr, count, cut, largest, temperature, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest logit at or above the cut: ids and mass above it, ids equal to it, its value."""
    smallest = tl.full([BLOCK], float("inf"), tl.float32)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        index = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + index, mask=index < count, other=float("-inf"))
        smallest = tl.minimum(smallest, tl.where(_order_key(logits) >= cut, logits, float("inf")))
    value = tl.min(smallest, axis=0)
    key = _order_key(value)
    above = tl.zeros([BLOCK], tl.int32)
    equal = tl.zeros([BLOCK], tl.int32)
    mass_above = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        index = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + index, mask=index < count, other=float("-inf"))
        keys = _order_key(logits)
        above += (keys > key).to(tl.int32)
        equal += (keys == key).to(tl.int32)
        mass_above += tl.where(keys > key, tl.exp((logits - largest) / temperature), 0.0)
    return tl.sum(above, axis=0), tl.sum(mass_above, axis=0), tl.sum(equal, axis=0), value
