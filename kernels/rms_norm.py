"""RMSNorm, alone and fused with the residual addition before it. T tokens, D normalised size."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, next_power_of_2, pdl_options


class Unscaled(NamedTuple):
    """Rows of an RMSNorm that lack its division by their root mean square: what reads them makes up for it (`kernels.linear`)."""

    rows: Tensor  # [T, D]: times the norm's weight
    squares: Tensor  # [T, P] float32: of the rows before that, summed over each of P parts
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x `[..., D]`, weight `[D]` -> contiguous, like x: `x / rms(x) * weight` over the last dimension, in float32."""
    return rms_norm_triton(x, weight, eps) if x.is_cuda else rms_norm_torch(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x `[T, D]` to residual `[T, D]` IN PLACE and returns the RMSNorm of the sum, `[T, D]` like x.

    The sum is rounded to residual's dtype before it is normalised, so that the norm sees what the next layer sees.
    Raises ValueError if residual is not contiguous.
    """
    if not residual.is_contiguous():
        raise ValueError(f"residual must be contiguous, got {tuple(residual.shape)} with strides {residual.stride()}")
    return add_rms_norm_triton(x, residual, weight, eps) if x.is_cuda else add_rms_norm_torch(x, residual, weight, eps)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = x.float()
    scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return (values * scale * weight.float()).to(x.dtype)


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.copy_(residual.float() + x.float())
    return rms_norm_torch(residual, weight, eps).to(x.dtype)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, None, weight, eps)


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, residual, weight, eps)


def tile(size: int) -> tuple[int, int, int]:
    """Rows and columns of a program, and its warps: never by the number of rows, since the order of sums hangs on them."""
    block = next_power_of_2(size)
    rows = max(1, 1024 // block)
    return rows, block, max(1, min(rows * block // 256, 16))  # 8 elements a thread: one 16-byte load of bfloat16


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    rows, size = flat.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows == 0:
        return y
    rows_per_program, block, warps = tile(size)
    _rms_norm_kernel[(cdiv(rows, rows_per_program),)](
        flat, residual, weight, y, rows, flat.stride(0), flat.stride(1), size, eps, residual is not None, rows_per_program, block,
        num_warps=warps, **pdl_options(x.device),
    )  # fmt: skip
    return y


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, rows, row_stride, column_stride, size, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < size)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + row * row_stride + column * column_stride, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        place = residual_ptr + row * size + column
        total = (x + tl.load(place, mask=inside, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(place, total, mask=inside)
        x = total.to(tl.float32)
    tl.store(y_ptr + row * size + column, normed(x, weight, size, eps), mask=inside)


@triton.jit
def normed(x, weight, size, eps):
    """The norm of rows of so many elements, float32, behind which zeros stand."""
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)
    return x * scale[:, None] * weight
