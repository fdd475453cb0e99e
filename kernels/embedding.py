"""Token embedding over this rank's range of the vocabulary. T tokens, V_local rows of this rank, D hidden size."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, next_power_of_2, pdl_options


def embedding(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """ids `[T]` int32 or int64, weight `[V_local, D]` -> `[T, D]` like weight.

    Ids outside `[first, first + V_local)` give zeros: the sum over the ranks is the embedding.
    Raises ValueError if weight is not contiguous.
    """
    if not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous, got {tuple(weight.shape)} with strides {weight.stride()}")
    return embedding_triton(ids, weight, first) if weight.is_cuda else embedding_torch(ids, weight, first)


def embedding_torch(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    local = ids.long() - first
    inside = (local >= 0) & (local < weight.shape[0])
    return weight[local.where(inside, 0)].masked_fill_(~inside[:, None], 0.0)


def embedding_triton(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    tokens, (rows, size) = ids.shape[0], weight.shape
    y = weight.new_empty(tokens, size)
    if tokens:
        block = min(next_power_of_2(size), 1024)
        _embedding_kernel[(tokens, cdiv(size, block))](ids, weight, y, first, rows, size, block, num_warps=4, **pdl_options(weight.device))
    return y


@triton.jit
def _embedding_kernel(ids_ptr, weight_ptr, y_ptr, first, rows, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    local = tl.load(ids_ptr + token).to(tl.int64) - first
    held = (local >= 0) & (local < rows)
    values = tl.load(weight_ptr + local * size + column, mask=inside & held, other=0.0)
    tl.store(y_ptr + token * size + column, values, mask=inside)
