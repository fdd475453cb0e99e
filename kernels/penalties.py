"""Logit bias, and penalties for the ids that a sequence holds already.

B rows, S slots, L columns of logits: the vocabulary ids from `first` on, N ids to count, M biases of a slot, P rows with prefill.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, next_power_of_2, pdl_options

IN_PROMPT = 1 << 30  # of a count: the id is in the prompt; the bits below say how often it was generated
TILE = 2048  # columns of a program
IDS = 256  # to count, of a program
SHARES = 8  # that a sequence to count is cut into


def penalise(
    logits: Tensor,
    slots: Tensor,
    counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    first: int = 0,
) -> None:
    """logits `[B, L]` float32, in place; slots `[B]` int32 or int64; by slot: counts `[S, L]` int32, presence, frequency and
    repetition `[S]` float32, bias_ids `[S, M]` int32 (no id twice; negative where unused), bias_values `[S, M]` float32.

    In this order: biases are added; a logit of an id that prompt or completion hold is divided by repetition, or multiplied when it is
    below 0; frequency is subtracted as often as the id was generated, and presence once if it was. A slot with presence 0, frequency 0,
    repetition 1 and no bias keeps its rows bit for bit, whatever its counts. Raises ValueError if the logits of a row or counts are not
    contiguous.
    """
    if logits.stride(1) != 1 or not counts.is_contiguous():
        raise ValueError(f"the logits of a row and counts must be contiguous, got strides {logits.stride()} and {counts.stride()}")
    implementation = penalise_triton if logits.is_cuda else penalise_torch
    implementation(logits, slots, counts, presence, frequency, repetition, bias_ids, bias_values, first)


def count(counts: Tensor, slots: Tensor, ids: Tensor, in_prompt: Tensor, first: int = 0) -> None:
    """counts `[S, L]` int32, in place; slots `[N]` int32 or int64, ids `[N]` int32, in_prompt `[N]` bool: of the prompt, not generated.

    A pair of slot and id may come more than once. Ids outside `[first, first + L)`, negative ones too, are not counted. Of a slot, no
    prompt ids may come after generated ones. Raises ValueError if counts are not contiguous.
    """
    if not counts.is_contiguous():
        raise ValueError(f"counts must be contiguous, got strides {counts.stride()}")
    implementation = count_triton if counts.is_cuda else count_torch
    implementation(counts, slots, ids, in_prompt, first)


def recount(
    counts: Tensor,
    counted: Tensor,
    slots: Tensor,
    lengths: Tensor,
    yields: Tensor,
    prompt_length: Tensor,
    token_ids: Tensor,
    page_table: Tensor,
    page_size: int,
    first: int = 0,
) -> None:
    """counts `[S, L]` int32, in place: anew, from what their pages hold, of the slots that are counted and whose rows yield a token.

    counted `[S]` bool; slots `[P]` int32, none of those twice; lengths `[P]` int32: tokens in the pages; yields `[P]` bool; prompt_length
    `[S]` int32: positions from there on were generated. token_ids int32 by place in the cache, page_table `[S, max_pages]` int32.
    Raises ValueError if counts or the page table are not contiguous.
    """
    if not (counts.is_contiguous() and page_table.is_contiguous()):
        raise ValueError(f"counts and page_table must be contiguous, got strides {counts.stride()} and {page_table.stride()}")
    implementation = recount_triton if counts.is_cuda else recount_torch
    implementation(counts, counted, slots, lengths, yields, prompt_length, token_ids, page_table, page_size, first)


def penalise_torch(
    logits: Tensor,
    slots: Tensor,
    counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    first: int = 0,
) -> None:
    slots = slots.long()
    columns = bias_ids[slots].long() - first
    inside = (columns >= 0) & (columns < logits.shape[1])
    logits.scatter_add_(1, columns.where(inside, 0), bias_values[slots].where(inside, 0.0))

    counted = counts[slots]
    generated = counted & (IN_PROMPT - 1)
    factor = repetition[slots, None]
    logits.copy_(torch.where(counted > 0, torch.where(logits > 0, logits / factor, logits * factor), logits))
    logits -= generated * frequency[slots, None] + (generated > 0) * presence[slots, None]


def count_torch(counts: Tensor, slots: Tensor, ids: Tensor, in_prompt: Tensor, first: int = 0) -> None:
    columns = ids.long() - first
    inside = (columns >= 0) & (columns < counts.shape[1])
    places = slots.long() * counts.shape[1] + columns.where(inside, 0)
    flat = counts.view(-1)
    flat.scatter_reduce_(0, places, (inside & in_prompt).int() * IN_PROMPT, "amax")
    flat.scatter_add_(0, places, (inside & ~in_prompt).int())


def recount_torch(
    counts: Tensor,
    counted: Tensor,
    slots: Tensor,
    lengths: Tensor,
    yields: Tensor,
    prompt_length: Tensor,
    token_ids: Tensor,
    page_table: Tensor,
    page_size: int,
    first: int = 0,
) -> None:
    wanted = yields & counted[slots.long()]
    slots, lengths = slots[wanted].long(), lengths[wanted].long()
    counts[slots] = 0
    row = torch.repeat_interleave(lengths)
    positions = torch.arange(len(row), device=row.device) - (lengths.cumsum(0) - lengths)[row]
    owners = slots[row]
    places = page_table[owners, positions // page_size].long() * page_size + positions % page_size
    count_torch(counts, owners, token_ids[places], positions < prompt_length[owners], first)


def penalise_triton(
    logits: Tensor,
    slots: Tensor,
    counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    first: int = 0,
) -> None:
    (rows, columns), biases = logits.shape, bias_ids.shape[1]
    if rows:
        _penalise_kernel[(cdiv(columns, TILE), rows)](
            logits, slots, counts, presence, frequency, repetition, bias_ids, bias_values, columns, logits.stride(0), biases, first,
            IN_PROMPT, TILE, next_power_of_2(max(biases, 1)), num_warps=8, **pdl_options(logits.device),
        )  # fmt: skip


def count_triton(counts: Tensor, slots: Tensor, ids: Tensor, in_prompt: Tensor, first: int = 0) -> None:
    number = len(ids)
    if number:
        _count_kernel[(cdiv(number, IDS),)](
            counts, slots, ids, in_prompt, number, counts.shape[1], first, IN_PROMPT, IDS, num_warps=4, **pdl_options(counts.device)
        )


def recount_triton(
    counts: Tensor,
    counted: Tensor,
    slots: Tensor,
    lengths: Tensor,
    yields: Tensor,
    prompt_length: Tensor,
    token_ids: Tensor,
    page_table: Tensor,
    page_size: int,
    first: int = 0,
) -> None:
    rows, columns, pdl = len(slots), counts.shape[1], pdl_options(counts.device)
    if rows:
        _clear_kernel[(cdiv(columns, TILE), rows)](counts, counted, slots, yields, columns, TILE, num_warps=8, **pdl)
        _recount_kernel[(SHARES, rows)](
            counts, counted, slots, lengths, yields, prompt_length, token_ids, page_table, page_table.shape[1], page_size, columns, first,
            IN_PROMPT, SHARES, IDS, num_warps=4, **pdl,
        )  # fmt: skip


@triton.jit
def _clear_kernel(counts_ptr, counted_ptr, slots_ptr, yields_ptr, columns, TILE: tl.constexpr, PDL: tl.constexpr):
    tile, row = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if (tl.load(yields_ptr + row) != 0) & (tl.load(counted_ptr + slot) != 0):
        column = tile * TILE + tl.arange(0, TILE)
        tl.store(counts_ptr + slot * columns + column, tl.zeros([TILE], tl.int32), mask=column < columns)


@triton.jit
def _recount_kernel(
    counts_ptr, counted_ptr, slots_ptr, lengths_ptr, yields_ptr, prompt_length_ptr, token_ids_ptr, page_table_ptr, max_pages, page_size,
    columns, first, IN_PROMPT: tl.constexpr, SHARES: tl.constexpr, IDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    share, row = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if (tl.load(yields_ptr + row) != 0) & (tl.load(counted_ptr + slot) != 0):
        length, prompt_length = tl.load(lengths_ptr + row), tl.load(prompt_length_ptr + slot)
        for start in range(share * IDS, length, SHARES * IDS):
            position = start + tl.arange(0, IDS)
            inside = position < length
            page = tl.load(page_table_ptr + slot * max_pages + position // page_size, mask=inside, other=0).to(tl.int64)
            column = tl.load(token_ids_ptr + page * page_size + position % page_size, mask=inside, other=-1) - first
            inside &= (column >= 0) & (column < columns)
            place, in_prompt = counts_ptr + slot * columns + column, position < prompt_length
            tl.atomic_or(place, tl.full([IDS], IN_PROMPT, tl.int32), mask=inside & in_prompt, sem="relaxed")
            tl.atomic_add(place, 1, mask=inside & (position >= prompt_length), sem="relaxed")


@triton.jit
def _penalise_kernel(
    logits_ptr, slots_ptr, counts_ptr, presence_ptr, frequency_ptr, repetition_ptr, bias_ids_ptr, bias_values_ptr,
    columns, row_stride, biases, first, IN_PROMPT: tl.constexpr, TILE: tl.constexpr, BIASES_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    bias = tl.arange(0, BIASES_BLOCK)
    bias_ids = tl.load(bias_ids_ptr + slot * biases + bias, mask=bias < biases, other=-1)
    biased = bias_ids - first
    here = (bias_ids >= 0) & (biased >= tile * TILE) & (biased < tl.minimum(tile * TILE + TILE, columns))
    if tl.max(here.to(tl.int32), axis=0) > 0:
        values = tl.load(bias_values_ptr + slot * biases + bias, mask=here, other=0.0)
        tl.store(row_ptr + biased, tl.load(row_ptr + biased, mask=here, other=0.0) + values, mask=here)
        tl.debug_barrier()  # other threads read what was stored
    presence, frequency, repetition = tl.load(presence_ptr + slot), tl.load(frequency_ptr + slot), tl.load(repetition_ptr + slot)
    if (presence != 0) | (frequency != 0) | (repetition != 1):
        column = tile * TILE + tl.arange(0, TILE)
        inside = column < columns
        logits = tl.load(row_ptr + column, mask=inside, other=0.0)
        counted = tl.load(counts_ptr + slot * columns + column, mask=inside, other=0)
        generated = counted & (IN_PROMPT - 1)
        factor = tl.where(counted > 0, repetition, 1.0)
        logits = tl.where(logits > 0, tl.div_rn(logits, factor), logits * factor)
        logits -= generated * frequency + tl.where(generated > 0, presence, 0.0)
        tl.store(row_ptr + column, logits, mask=inside & (counted != 0))


@triton.jit
def _count_kernel(
    counts_ptr, slots_ptr, ids_ptr, in_prompt_ptr, number, columns, first, IN_PROMPT: tl.constexpr, IDS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0) * IDS + tl.arange(0, IDS)
    inside = index < number
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.load(ids_ptr + index, mask=inside, other=-1) - first
    inside &= (column >= 0) & (column < columns)
    place = counts_ptr + tl.load(slots_ptr + index, mask=inside, other=0).to(tl.int64) * columns + column
    in_prompt = tl.load(in_prompt_ptr + index, mask=inside, other=0) != 0
    # Of integers, so in whatever order: the result is the same.
    tl.atomic_or(place, tl.full([IDS], IN_PROMPT, tl.int32), mask=inside & in_prompt, sem="relaxed")
    tl.atomic_add(place, 1, mask=inside & (in_prompt == 0), sem="relaxed")
