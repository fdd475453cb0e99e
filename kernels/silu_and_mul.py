"""The gated activation of an MLP: SiLU of the gate times the up projection. T tokens, D intermediate size of this rank."""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, next_power_of_2, pdl_options


def silu_and_mul(x: Tensor) -> Tensor:
    """x `[T, 2 * D]`, the gate's columns before the up projection's, T may be 0 -> `[T, D]` like x, computed in float32.

    Raises ValueError if the last dimension is odd or x is not contiguous.
    """
    if x.dim() != 2 or x.shape[1] % 2 or not x.is_contiguous():
        raise ValueError(f"x must be a contiguous [T, 2 * D], got {tuple(x.shape)} with strides {x.stride()}")
    return silu_and_mul_triton(x) if x.is_cuda else silu_and_mul_torch(x)


def silu_and_mul_torch(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=1)
    return (F.silu(gate) * up).to(x.dtype)


def silu_and_mul_triton(x: Tensor) -> Tensor:
    tokens, size = x.shape[0], x.shape[1] // 2
    y = x.new_empty(tokens, size)
    if tokens:
        block = min(next_power_of_2(size), 1024)
        _silu_and_mul_kernel[(tokens, cdiv(size, block))](x, y, size, block, num_warps=4, **pdl_options(x.device))
    return y


@triton.jit
def _silu_and_mul_kernel(x_ptr, y_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # 2**31 elements are passed at 74,899 tokens of 2 * 14,336
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # In float32 from the load on: Triton's interpreter gets bfloat16 arithmetic wrong.
    gate = tl.load(x_ptr + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * size + column, gate * tl.sigmoid(gate) * up, mask=inside)
