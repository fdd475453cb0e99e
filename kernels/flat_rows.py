"""Rows of flat logits, of which top-p or min-p keeps more than one program can gather: many programs share their columns.

The program that cuts a row (`kernels.filters`) estimates from a sample of its columns where top-p ends, and writes pivots around that. Then
`_measure_kernel` takes counts and masses above the pivots, `_score_kernel` the best of what is above the end for certain and a list of what
lies between two pivots, and `_settle_kernel` finds the end in that list. Where the estimate was wrong, or several logits at the end are
equal, that last program goes over the row by itself. Nothing depends on the order of the list: masses are summed in integers there.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.filters import choose_filtered
from kernels.launch import pdl_options
from kernels.noise import gumbel_block, gumbel_of, uniform_block
from kernels.search import BLOCK, LANES, LOG2_E, PIVOTS, WARPS, WIDTH, above_pivots, even_pivots, logit_of, order_key

SHARES = 16  # of a row's columns, to be measured
SCORED_SHARES = 4  # to be scored: the longer a share, the more of it is known not to win before its noise is computed
LIST = 8192  # ids between two pivots: twice what the estimate aims at
SAMPLES = tl.constexpr(4)  # blocks of columns, evenly over the row
ROUNDS = tl.constexpr(3)  # each cuts what is searched in nine
PLAN = 16  # int64 of a row: PIVOTS keys, and those below
FAILS, HOLDS, FLAG, NARROWED_FAILS, NARROWED_HOLDS = tl.constexpr(8), tl.constexpr(9), tl.constexpr(10), tl.constexpr(11), tl.constexpr(12)
SETTLED, SHARED, WHOLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # the flag: what is left to do
FLOATS = 4  # of a row: largest logit, mass, mass above
UNIT = tl.constexpr(2.0**40)  # of masses in integers; a row's are at most 2**18


@triton.jit
def plan_flat_row(
    plan_ptr, floats_ptr, listed_ptr, row_ptr, fails, holds, largest, mass, temperature, top_k, top_p, columns, LIST: tl.constexpr
):  # fmt: skip
    """For a row with more between `fails` and `holds` than was gathered."""
    tl.store(floats_ptr, largest)
    tl.store(floats_ptr + 1, mass)
    tl.store(listed_ptr, 0)
    tl.store(plan_ptr + FAILS, fails)
    tl.store(plan_ptr + HOLDS, holds)
    tl.store(plan_ptr + FLAG, tl.where(top_k < columns, WHOLE, SHARED).to(tl.int64))
    if (top_k >= columns) & (top_p < 1):
        pivots = _estimate(row_ptr, fails, holds, largest, temperature, top_p, columns, LIST)
        tl.store(plan_ptr + tl.arange(0, PIVOTS), pivots)


@triton.jit
def _estimate(row_ptr, fails, holds, largest, temperature, top_p, columns, LIST: tl.constexpr):
    """Keys around where the sample's top-p ends, as far apart as LIST / 2 ids of the row should be."""
    every = columns // SAMPLES
    size = tl.minimum(every, BLOCK)
    low, high = fails, holds
    above_low, above_high = SAMPLES * size, tl.full([], 0, tl.int32)
    spacing = (logit_of(high) - logit_of(low)) / (PIVOTS + 1)
    for _ in tl.static_range(ROUNDS):
        pivots = even_pivots(low, high)
        counts, masses, mass = _above_in_sample(row_ptr, pivots, every, size, largest, temperature)
        failed = (masses >= top_p * mass) & (pivots < high)
        above_low = tl.minimum(above_low, tl.min(tl.where(failed, counts, 2**30), axis=0))
        low = tl.maximum(low, tl.max(tl.where(failed, pivots, low), axis=0))
        least = tl.min(tl.where(failed, high, pivots), axis=0)
        if least < high:
            above_high = tl.max(tl.where(pivots == least, counts, 0), axis=0)
        high = least
        inside = above_low - above_high
        if inside >= 32:  # enough to tell how dense logits are here
            wanted = (LIST // 2) * 1.0 / columns * (SAMPLES * size)
            spacing = (logit_of(high) - logit_of(low)) * (wanted / inside)
    middle = 0.5 * (logit_of(low) + logit_of(high))
    number = tl.arange(0, PIVOTS).to(tl.float32) - (PIVOTS - 1) / 2
    keys = order_key(middle + number * spacing).to(tl.int64)
    return tl.minimum(tl.maximum(keys, fails + 1), holds)


@triton.jit
def _above_in_sample(row_ptr, pivots, every, size, largest, temperature):
    """As `above_pivots`, and the mass of all of the sample."""
    above, mass_above = tl.zeros([PIVOTS, LANES], tl.int32), tl.zeros([PIVOTS, LANES], tl.float32)
    total = tl.zeros([LANES], tl.float32)
    limits, factor = logit_of(pivots)[:, None, None], LOG2_E / temperature
    place = tl.arange(0, WIDTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    for block in range(SAMPLES):
        logits = tl.load(row_ptr + block * every + place, mask=place < size, other=float("-inf")).to(tl.float32)
        masses = tl.exp2((logits - largest) * factor)
        is_above = logits[None, :, :] > limits
        above += tl.sum(is_above.to(tl.int32), axis=1)
        mass_above += tl.sum(tl.where(is_above, masses[None, :, :], 0.0), axis=1)
        total += tl.sum(masses, axis=0)
    return tl.sum(above, axis=1), tl.sum(mass_above, axis=1), tl.sum(total, axis=0)


def settle_flat_rows(
    logits: Tensor,
    ids: Tensor,
    plan: Tensor,
    floats: Tensor,
    listed: Tensor,
    scratch: tuple[Tensor, ...],
    parameters: tuple[Tensor | None, ...],
    first: int,
    search: tuple[int, ...],
) -> None:
    """Three launches, for what `plan_flat_row` has left. scratch: maxima, hits, gathered ids and logits of the rows; parameters: as in
    `kernels.sampling`; search: runs, RUN, RUNS_BLOCK, ROOM."""
    (rows, columns), stride, pdl = logits.shape, logits.stride(0), pdl_options(logits.device)
    counts = listed.new_empty(rows, SHARES, PIVOTS.value)
    masses = floats.new_empty(rows, SHARES, PIVOTS.value)
    list_ids, list_logits = listed.new_empty(rows, LIST), floats.new_empty(rows, LIST)
    bests, winners = floats.new_empty(rows, SCORED_SHARES), listed.new_empty(rows, SCORED_SHARES)
    by_slot = parameters[-1] is not None
    _measure_kernel[(SHARES, rows)](
        logits, plan, floats, counts, masses, parameters[0], parameters[-1], columns, stride, by_slot, SHARES, PLAN, FLOATS,
        num_warps=WARPS, **pdl,
    )  # fmt: skip
    _score_kernel[(SCORED_SHARES, rows)](
        logits, plan, floats, counts, masses, listed, list_ids, list_logits, bests, winners, *parameters,
        first, columns, stride, by_slot, SHARES, SCORED_SHARES, LIST, PLAN, FLOATS, num_warps=WARPS, **pdl,
    )  # fmt: skip
    _settle_kernel[(rows,)](
        logits, ids, plan, floats, listed, list_ids, list_logits, bests, winners, *scratch, *parameters,
        first, columns, stride, search[0], by_slot, SCORED_SHARES, LIST, PLAN, FLOATS, *search[1:], num_warps=WARPS, **pdl,
    )  # fmt: skip


@triton.jit
def _measure_kernel(
    logits_ptr, plan_ptr, floats_ptr, counts_ptr, masses_ptr, temperature_ptr, slots_ptr, columns, row_stride,
    BY_SLOT: tl.constexpr, SHARES: tl.constexpr, PLAN: tl.constexpr, FLOATS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    share, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(plan_ptr + row * PLAN + FLAG) == SHARED:
        slot = tl.load(slots_ptr + row) if BY_SLOT else row
        pivots = tl.load(plan_ptr + row * PLAN + tl.arange(0, PIVOTS))
        begin, size = _part(share, columns, SHARES)
        counts, masses = above_pivots(
            logits_ptr + row * row_stride + begin, size, pivots, tl.load(floats_ptr + row * FLOATS), tl.load(temperature_ptr + slot), 3
        )
        place = (row * SHARES + share) * PIVOTS + tl.arange(0, PIVOTS)
        tl.store(counts_ptr + place, counts)
        tl.store(masses_ptr + place, masses)


@triton.jit
def _part(share, columns, SHARES: tl.constexpr):
    """Where a share's columns begin, and how many they are."""
    most = tl.cdiv(columns, SHARES * 128) * 128
    return share * most, tl.maximum(tl.minimum(most, columns - share * most), 0)


@triton.jit
def _score_kernel(
    logits_ptr, plan_ptr, floats_ptr, counts_ptr, masses_ptr, listed_ptr, list_ids_ptr, list_logits_ptr, bests_ptr, winners_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, slots_ptr, first, columns, row_stride,
    BY_SLOT: tl.constexpr, SHARES: tl.constexpr, SCORED_SHARES: tl.constexpr, LIST: tl.constexpr, PLAN: tl.constexpr,
    FLOATS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a column whose score would pass the best so far, 1 - uniform is below exp(logit / temperature - best): what is above is not
    computed, and mostly that is all of a block."""
    share, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    plan_ptr += row * PLAN
    floats_ptr += row * FLOATS
    if tl.load(plan_ptr + FLAG) == SHARED:
        slot = tl.load(slots_ptr + row) if BY_SLOT else row
        temperature, top_p, min_p = tl.load(temperature_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
        seed, position = tl.load(seeds_ptr + slot), tl.load(positions_ptr + row)
        largest, mass = tl.load(floats_ptr), tl.load(floats_ptr + 1)
        fails, holds = tl.load(plan_ptr + FAILS), tl.load(plan_ptr + HOLDS)
        mass_above = tl.full([], 0.0, tl.float32)
        if top_p < 1:
            number = tl.arange(0, PIVOTS)
            place = (row * SHARES + tl.arange(0, SHARES)[:, None]) * PIVOTS + number[None, :]
            pivots, masses = tl.load(plan_ptr + number), tl.sum(tl.load(masses_ptr + place), axis=0)
            failed = (masses >= top_p * mass) & (pivots < holds)
            fails = tl.maximum(fails, tl.max(tl.where(failed, pivots, fails), axis=0))
            holds = tl.min(tl.where(failed, holds, pivots), axis=0)
            mass_above = tl.max(tl.where(pivots == holds, masses, 0.0), axis=0)
        else:
            holds = fails  # min-p alone keeps all of them that it does not drop
        if share == 0:
            tl.store(plan_ptr + NARROWED_FAILS, fails)
            tl.store(plan_ptr + NARROWED_HOLDS, holds)
            tl.store(floats_ptr + 2, mass_above)
        row_ptr = logits_ptr + row * row_stride
        begin, size = _part(share, columns, SCORED_SHARES)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        winner = tl.full([BLOCK], 2**30, tl.int32)
        to_pass = tl.full([], float("-inf"), tl.float32)  # the best so far
        above_fails, above_holds, factor = logit_of(fails), logit_of(holds), 1.0 / temperature
        for start in tl.range(begin, begin + size, BLOCK, num_stages=3):
            column = start + tl.arange(0, BLOCK)
            logits = tl.load(row_ptr + column, mask=column < begin + size, other=float("-inf")).to(tl.float32)
            wanted = (logits > above_fails) & (logits <= above_holds)
            place = tl.atomic_add(listed_ptr + row + tl.zeros([BLOCK], tl.int32), 1, mask=wanted, sem="relaxed")
            fits = wanted & (place < LIST)
            tl.store(list_ids_ptr + row * LIST + place, column, mask=fits)
            tl.store(list_logits_ptr + row * LIST + place, logits, mask=fits)
            kept = logits > above_holds
            uniform = uniform_block(seed, position, first + column)
            if tl.max((kept & (1 - uniform <= 1.001 * tl.exp(logits * factor - to_pass))).to(tl.int32), axis=0) > 0:
                noise = gumbel_of(uniform)
                best, winner = _better(best, winner, logits, kept, column, largest, temperature, min_p, noise)
                to_pass = tl.max(best, axis=0)
        top, column = _winner(best, winner)
        tl.store(bests_ptr + row * SCORED_SHARES + share, top)
        tl.store(winners_ptr + row * SCORED_SHARES + share, column)


@triton.jit
def _better(best, winner, logits, kept, column, largest, temperature, min_p, noise):
    """The best score that each lane has seen, and its column."""
    kept &= tl.exp((logits - largest) / temperature) >= tl.minimum(min_p, 1.0)
    score = tl.where(kept, logits / temperature + noise, float("-inf"))
    better = (score > best) | ((score == best) & (column < winner) & kept)
    return tl.where(better, score, best), tl.where(better, column, winner)


@triton.jit
def _winner(best, winner):
    """Of all lanes; of equal scores the lowest column."""
    top = tl.max(best, axis=0)
    return top, tl.min(tl.where(best == top, winner, 2**30), axis=0)


@triton.jit
def _settle_kernel(
    logits_ptr, ids_ptr, plan_ptr, floats_ptr, listed_ptr, list_ids_ptr, list_logits_ptr, bests_ptr, winners_ptr,
    maxima_ptr, hits_ptr, gathered_ids_ptr, gathered_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, positions_ptr, slots_ptr, first, columns, row_stride, runs,
    BY_SLOT: tl.constexpr, SHARES: tl.constexpr, LIST: tl.constexpr, PLAN: tl.constexpr, FLOATS: tl.constexpr, RUN: tl.constexpr,
    RUNS_BLOCK: tl.constexpr, ROOM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    plan_ptr += row * PLAN
    floats_ptr += row * FLOATS
    flag = tl.load(plan_ptr + FLAG)
    if flag != SETTLED:
        slot = tl.load(slots_ptr + row) if BY_SLOT else row
        temperature, top_p, min_p = tl.load(temperature_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
        seed, position = tl.load(seeds_ptr + slot), tl.load(positions_ptr + row)
        largest, mass = tl.load(floats_ptr), tl.load(floats_ptr + 1)
        winner = tl.full([], 2**30, tl.int32)
        count = tl.load(listed_ptr + row)
        if (flag == SHARED) & (count <= LIST):
            list_ids_ptr += row * LIST
            list_logits_ptr += row * LIST
            cut, equal = _end_of_list(
                list_logits_ptr, count, tl.load(plan_ptr + NARROWED_FAILS), tl.load(plan_ptr + NARROWED_HOLDS), largest, temperature,
                tl.load(floats_ptr + 2), top_p * mass,
            )  # fmt: skip
            if equal <= 1:
                best = tl.full([BLOCK], float("-inf"), tl.float32)
                columns_of_best = tl.full([BLOCK], 2**30, tl.int32)
                for start in tl.range(0, count, BLOCK):
                    index = start + tl.arange(0, BLOCK)
                    logits = tl.load(list_logits_ptr + index, mask=index < count, other=float("-inf"))
                    column = tl.load(list_ids_ptr + index, mask=index < count, other=2**30)
                    kept = (order_key(logits) >= cut) & (index < count)
                    noise = gumbel_block(seed, position, first + column)
                    best, columns_of_best = _better(best, columns_of_best, logits, kept, column, largest, temperature, min_p, noise)
                share = tl.arange(0, SHARES)
                bests, winners = tl.load(bests_ptr + row * SHARES + share), tl.load(winners_ptr + row * SHARES + share)
                of_shares, first_winner = _winner(bests, winners)
                of_list, list_winner = _winner(best, columns_of_best)
                winner = tl.where(of_shares > of_list, first_winner, list_winner)
                if of_shares == of_list:
                    winner = tl.minimum(first_winner, list_winner)
        if winner == 2**30:
            winner = choose_filtered(
                logits_ptr + row * row_stride, maxima_ptr + row * runs, hits_ptr + row * runs,
                gathered_ids_ptr + row * ROOM, gathered_ptr + row * ROOM, largest, mass, temperature, tl.load(top_k_ptr + slot), top_p,
                min_p, seed, position, first, columns, runs, RUN, RUNS_BLOCK, ROOM,
            )  # fmt: skip
        tl.store(ids_ptr + row, first + winner)


@triton.jit
def _end_of_list(logits_ptr, count, fails, holds, largest, temperature, mass_above, limit):
    """The smallest key of the list's with less mass than limit strictly above it, all of them above `fails` and up to `holds`, and how
    many equal it."""
    above, inside = tl.full([], 0, tl.int32), count
    while (holds - fails > 1) & (inside > 1):
        pivots = even_pivots(fails, holds)
        counts, masses = tl.zeros([PIVOTS, LANES], tl.int32), tl.zeros([PIVOTS, LANES], tl.int64)
        lane = tl.arange(0, WIDTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        for start in tl.range(0, count, BLOCK):
            index = start + lane
            logits = tl.load(logits_ptr + index, mask=index < count, other=float("-inf"))
            is_above = (order_key(logits)[None, :, :] > pivots[:, None, None]) & (index < count)[None, :, :]
            mass = (tl.exp((logits - largest) / temperature) * UNIT).to(tl.int64)
            counts += tl.sum(is_above.to(tl.int32), axis=1)
            masses += tl.sum(tl.where(is_above, mass[None, :, :], 0), axis=1)
        number = tl.sum(counts, axis=1)
        failed = (mass_above + tl.sum(masses, axis=1).to(tl.float32) / UNIT >= limit) & (pivots < holds)
        above_fails = tl.minimum(above + inside, tl.min(tl.where(failed, number, 2**30), axis=0))
        fails = tl.maximum(fails, tl.max(tl.where(failed, pivots, fails), axis=0))
        least = tl.min(tl.where(failed, holds, pivots), axis=0)
        if least < holds:
            above = tl.max(tl.where(pivots == least, number, 0), axis=0)
        holds = least
        inside = above_fails - above
    if inside == 1:  # that one, wherever between the two it is
        highest = tl.full([BLOCK], -(2**31), tl.int64)
        for start in tl.range(0, count, BLOCK):
            index = start + tl.arange(0, BLOCK)
            keys = order_key(tl.load(logits_ptr + index, mask=index < count, other=float("-inf"))).to(tl.int64)
            highest = tl.maximum(highest, tl.where((keys > fails) & (keys <= holds) & (index < count), keys, -(2**31)))
        holds = tl.max(highest, axis=0)
    return holds, inside
