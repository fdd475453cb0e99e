"""Matrix products, of few rows by `kernels.skinny_linear`, of more by the library: which of them and by what tiles, the GPU's table says.

M rows, N columns (outputs), K inner size. An RMSNorm between two products of few rows needs no launch: the first begins it, the second,
which reads Unscaled rows, ends it.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.library import library_linear
from kernels.rms_norm import Unscaled
from kernels.silu_and_mul import silu_and_mul, silu_and_mul_torch
from kernels.skinny_linear import Config, gated_linear_triton, linear_add_norm_triton, linear_triton, widened_linear_triton
from kernels.tuning import entries, entry_for, remembered

MAX_ROWS = 128  # of a product that the kernel is considered for


def linear(x: Tensor | Unscaled, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x `[M, K]`, weight `[N, K]`, bias `[N]` -> `x @ weight.T + bias`, `[M, N]` like x, summed in float32."""
    if isinstance(x, Unscaled):
        return linear_triton(x, weight, bias, _needed("linear", x.rows, *weight.shape)) if x.rows.is_cuda else linear_torch(x, weight, bias)
    tuned = config("linear", x.device, x.dtype, x.shape[0], *weight.shape)
    return library_linear(x, weight, bias) if tuned is None else linear_triton(x, weight, bias, tuned)


def widened_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x `[M, K]`, weight `[N, K]` -> `x @ weight.T`, `[M, N]` float32, as it was summed; on a CPU rounded to x's type in between."""
    tuned = config("linear", x.device, x.dtype, x.shape[0], *weight.shape)
    if tuned is not None:
        return widened_linear_triton(x, weight, tuned)
    if x.is_cuda and x.dtype != torch.float32:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x, weight).float()


def gated_linear(x: Tensor | Unscaled, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x `[M, K]`, weight `[2 * N, K]` and bias `[2 * N]`, the gate's before the up projection's -> `[M, N]` like x.

    The SiLU of the gate's product times the up projection's, in float32 up to the result; where the library computes the products,
    these are rounded to x's type in between.
    """
    columns, size = weight.shape[0] // 2, weight.shape[1]
    if isinstance(x, Unscaled):
        if not x.rows.is_cuda:
            return gated_linear_torch(x, weight, bias)
        return gated_linear_triton(x, weight, bias, _needed("gated_linear", x.rows, columns, size))
    tuned = config("gated_linear", x.device, x.dtype, x.shape[0], columns, size)
    return silu_and_mul(library_linear(x, weight, bias)) if tuned is None else gated_linear_triton(x, weight, bias, tuned)


def begins_norm(x: Tensor, weight: Tensor, reader: Tensor, gated: bool) -> bool:
    """Whether `linear_add_norm` of these is to run: both products by the kernel, and the table says that it pays.

    reader: the weight of the product that reads the norm, gated or not. Only in bfloat16, which can hold rows that are not scaled yet.
    """
    if x.dtype != torch.bfloat16 or config("linear", x.device, x.dtype, x.shape[0], *weight.shape) is None:
        return False
    columns, operation = (reader.shape[0] // 2, "gated_linear") if gated else (reader.shape[0], "linear")
    read = config(operation, x.device, x.dtype, x.shape[0], columns, reader.shape[1])
    return read is not None and read.reads_unscaled == 1


def linear_add_norm(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float) -> Unscaled:
    """Adds the product x `[M, K]`, weight `[N, K]`, bias `[N]` to residual `[M, N]` IN PLACE -> the RMSNorm of the sum, with norm `[N]`.

    The product and the sum are rounded as by `linear` and `add_rms_norm`; the norm, multiplied by its weight alone, is rounded there,
    so the last bits of what reads it differ from theirs. Residual must not come from the kernel just before: it is read ahead of its end.
    """
    if not x.is_cuda:
        return linear_add_norm_torch(x, weight, bias, residual, norm, eps)
    return linear_add_norm_triton(x, weight, bias, residual, norm, eps, _needed("linear", x, *weight.shape))


def linear_torch(x: Tensor | Unscaled, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _product(x, weight, bias).to(weight.dtype)


def gated_linear_torch(x: Tensor | Unscaled, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return silu_and_mul_torch(_product(x, weight, bias)).to(weight.dtype)


def linear_add_norm_torch(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float) -> Unscaled:
    residual.copy_(residual.float() + linear_torch(x, weight, bias).float())
    values = residual.float()
    return Unscaled((values * norm.float()).to(x.dtype), values.square().sum(dim=1, keepdim=True), eps)


def _product(x: Tensor | Unscaled, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(x, Unscaled):
        scale = torch.rsqrt(x.squares.sum(dim=1, keepdim=True) / x.rows.shape[1] + x.eps)
        y = F.linear(x.rows.float(), weight.float()) * scale
        return y if bias is None else y + bias.float()
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


@remembered
def config(operation: str, device: torch.device, dtype: torch.dtype, rows: int, columns: int, size: int) -> Config | None:
    """None: the library's product is to run."""
    if not 0 < rows <= MAX_ROWS:
        return None
    return config_of(entries(device, dtype, operation, f"{columns}x{size}"), rows)


def config_of(measured: Mapping[str, list[int]], rows: int) -> Config | None:
    """From a shape's entries."""
    found = entry_for(measured, rows)
    return Config(*found) if found else None


def _needed(operation: str, x: Tensor, columns: int, size: int) -> Config:
    tuned = config(operation, x.device, x.dtype, x.shape[0], columns, size)
    if tuned is None:
        raise ValueError(f"{operation} of {x.shape[0]} rows, {columns}x{size}, is the library's: ask begins_norm first")
    return tuned
