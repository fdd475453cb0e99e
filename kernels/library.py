"""The library's products, by cuBLAS or by cuBLASLt, whose rules choose other kernels: a table says where the second is faster."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.tuning import entries


def library_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x `[M, K]`, weight `[N, K]`, bias `[N]` -> `x @ weight.T + bias`, `[M, N]` like x, summed in float32.

    torch's choice between the two is the process's: no other thread may multiply meanwhile.
    """
    if not is_lt_faster(x.device, x.dtype, x.shape[0], *weight.shape):
        return F.linear(x, weight, bias)
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        return F.linear(x, weight, bias)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@functools.cache
def is_lt_faster(device: torch.device, dtype: torch.dtype, rows: int, columns: int, size: int) -> bool:
    """By the entry for the least measured number of rows that is not below `rows`; never for more, which tensor cores bind."""
    measured = entries(device, dtype, "library", f"{columns}x{size}")
    least = min((int(most) for most in measured if int(most) >= rows), default=None)
    return least is not None and bool(measured[str(least)])
