"""Forbids the ids that would end a row below its least length. B rows, S slots, L columns of logits, E and M ids as in `advance`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import next_power_of_2, pdl_options


def forbid_early_end(
    logits: Tensor,
    min_length: Tensor,
    ignore_eos: Tensor,
    stop_ids: Tensor,
    eos_ids: Tensor,
    slots: Tensor,
    lengths: Tensor,
    first: int = 0,
) -> None:
    """Sets logits `[B, L]`, of the vocabulary ids from `first` on, to -inf in place, where `lengths[b] < min_length[slots[b]]`.

    min_length `[S]` int32, ignore_eos `[S]` bool: only stop ids end the slot's row; stop_ids `[S, M]` int32 (negative where unused);
    eos_ids `[E]` int32; slots `[B]` int32 or int64, lengths `[B]` int32, tokens now in the cache. A NaN stays one.
    Raises ValueError if the logits of a row are not contiguous.
    """
    if logits.stride(1) != 1:
        raise ValueError(f"the logits of a row must be contiguous, got strides {logits.stride()}")
    implementation = forbid_early_end_triton if logits.is_cuda else forbid_early_end_torch
    implementation(logits, min_length, ignore_eos, stop_ids, eos_ids, slots, lengths, first)


def forbid_early_end_torch(
    logits: Tensor,
    min_length: Tensor,
    ignore_eos: Tensor,
    stop_ids: Tensor,
    eos_ids: Tensor,
    slots: Tensor,
    lengths: Tensor,
    first: int = 0,
) -> None:
    slots = slots.long()
    early = (lengths < min_length[slots])[:, None]
    eos = eos_ids.expand(len(slots), -1).masked_fill(ignore_eos[slots][:, None], -1)
    ends = torch.cat((eos, stop_ids[slots]), dim=1).long()
    columns = ends - first
    forbidden = early & (ends >= 0) & (columns >= 0) & (columns < logits.shape[1])
    # The least of the logit and +-inf: a place may be named twice, and a NaN stays one.
    bounds = torch.full_like(ends, torch.inf, dtype=logits.dtype).masked_fill_(forbidden, -torch.inf)
    logits.scatter_reduce_(1, columns.clamp(0, logits.shape[1] - 1), bounds, "amin")


def forbid_early_end_triton(
    logits: Tensor,
    min_length: Tensor,
    ignore_eos: Tensor,
    stop_ids: Tensor,
    eos_ids: Tensor,
    slots: Tensor,
    lengths: Tensor,
    first: int = 0,
) -> None:
    rows, columns = logits.shape
    if rows:
        _forbid_early_end_kernel[(rows,)](
            logits, min_length, ignore_eos, stop_ids, eos_ids, slots, lengths, logits.stride(0), columns, first,
            len(eos_ids), stop_ids.shape[1], next_power_of_2(max(len(eos_ids), 1)), next_power_of_2(stop_ids.shape[1]),
            num_warps=1, **pdl_options(logits.device),
        )  # fmt: skip


@triton.jit
def _forbid_early_end_kernel(
    logits_ptr, min_length_ptr, ignore_eos_ptr, stop_ids_ptr, eos_ids_ptr, slots_ptr, lengths_ptr,
    row_stride, columns, first, num_eos, num_stop, EOS_BLOCK: tl.constexpr, STOP_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if tl.load(lengths_ptr + row) < tl.load(min_length_ptr + slot):
        row_ptr = logits_ptr + row * row_stride
        stop = tl.arange(0, STOP_BLOCK)
        _forbid(row_ptr, tl.load(stop_ids_ptr + slot * num_stop + stop, mask=stop < num_stop, other=-1), first, columns)
        if tl.load(ignore_eos_ptr + slot) == 0:
            eos = tl.arange(0, EOS_BLOCK)
            _forbid(row_ptr, tl.load(eos_ids_ptr + eos, mask=eos < num_eos, other=-1), first, columns)


@triton.jit
def _forbid(row_ptr, ids, first, columns):
    column = ids - first
    inside = (ids >= 0) & (column >= 0) & (column < columns)
    logits = tl.load(row_ptr + column, mask=inside, other=0.0)
    tl.store(row_ptr + column, tl.full(logits.shape, float("-inf"), logits.dtype), mask=inside & (logits == logits))
