"""Logit bias, and penalties for the ids that a sequence holds already: see `kernels.counts`.

B rows, S slots, L columns of logits: the vocabulary ids from `first` on, M biases of a slot.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.counts import IN_PROMPT, Held
from kernels.launch import next_power_of_2, pdl_options

IDS = 256  # of a program at a time
SHARES = 8  # that a list is cut into


def penalise(
    logits: Tensor,
    slots: Tensor,
    held: Held,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    first: int = 0,
) -> None:
    """logits `[B, L]` float32, in place; slots `[B]` int32 or int64; by slot: what is held; presence, frequency and repetition `[S]`
    float32, bias_ids `[S, M]` int32 (no id twice; negative where unused), bias_values `[S, M]` float32.

    In this order: biases are added; a logit of an id that prompt or completion hold is divided by repetition, or multiplied when it is
    below 0; frequency is subtracted as often as the id was generated, and presence once if it was. A slot with presence 0, frequency 0,
    repetition 1 and no bias keeps its rows bit for bit, whatever it holds. Raises ValueError if the logits of a row, counts or lists are
    not contiguous.
    """
    held.check()
    if logits.stride(1) != 1:
        raise ValueError(f"the logits of a row must be contiguous, got strides {logits.stride()}")
    implementation = penalise_triton if logits.is_cuda else penalise_torch
    implementation(logits, slots, held, presence, frequency, repetition, bias_ids, bias_values, first)


def penalise_torch(
    logits: Tensor,
    slots: Tensor,
    held: Held,
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

    counts = held.counts[slots]
    generated = counts & (IN_PROMPT - 1)
    factor = repetition[slots, None]
    logits.copy_(torch.where(counts > 0, torch.where(logits > 0, logits / factor, logits * factor), logits))
    logits -= generated * frequency[slots, None] + (generated > 0) * presence[slots, None]


def penalise_triton(
    logits: Tensor,
    slots: Tensor,
    held: Held,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    first: int = 0,
) -> None:
    (rows, columns), biases = logits.shape, bias_ids.shape[1]
    if rows:
        # Without multiply-adds, whose one rounding for two would make other bits than the reference.
        _penalise_kernel[(SHARES, rows)](
            logits, slots, *held, presence, frequency, repetition, bias_ids, bias_values,
            columns, held.listed.shape[1], logits.stride(0), biases, first,
            IN_PROMPT, SHARES, IDS, next_power_of_2(max(biases, 1)), num_warps=4, enable_fp_fusion=False, **pdl_options(logits.device),
        )  # fmt: skip


@triton.jit
def _penalise_kernel(
    logits_ptr, slots_ptr, counts_ptr, listed_ptr, distinct_ptr, presence_ptr, frequency_ptr, repetition_ptr, bias_ids_ptr,
    bias_values_ptr, columns, room, row_stride, biases, first,
    IN_PROMPT: tl.constexpr, SHARES: tl.constexpr, IDS: tl.constexpr, BIASES_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    share, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    presence, frequency, repetition = tl.load(presence_ptr + slot), tl.load(frequency_ptr + slot), tl.load(repetition_ptr + slot)
    distinct = tl.load(distinct_ptr + slot)
    bias = tl.arange(0, BIASES_BLOCK)
    bias_ids = tl.load(bias_ids_ptr + slot * biases + bias, mask=bias < biases, other=-1)
    biased = bias_ids - first
    here = (bias_ids >= 0) & (biased >= 0) & (biased < columns)
    shares = SHARES
    if tl.max(here.to(tl.int32), axis=0) > 0:
        shares = 1  # an id may be held, too: the program that has added its bias does the rest of the row
        if share == 0:
            values = tl.load(bias_values_ptr + slot * biases + bias, mask=here, other=0.0)
            tl.store(row_ptr + biased, tl.load(row_ptr + biased, mask=here, other=0.0) + values, mask=here)
            tl.debug_barrier()  # other threads read what was stored
    if (share < shares) & ((presence != 0) | (frequency != 0) | (repetition != 1)):
        for start in range(share * IDS, distinct, shares * IDS):
            index = start + tl.arange(0, IDS)
            inside = index < distinct
            column = tl.load(listed_ptr + slot * room + index, mask=inside, other=0)
            logits = tl.load(row_ptr + column, mask=inside, other=0.0)
            generated = tl.load(counts_ptr + slot * columns + column, mask=inside, other=0) & (IN_PROMPT - 1)
            logits = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
            logits -= generated * frequency + tl.where(generated > 0, presence, 0.0)
            tl.store(row_ptr + column, logits, mask=inside)
