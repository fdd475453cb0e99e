"""The library's products, by cuBLAS or by cuBLASLt, whose rules choose other kernels: a table says where the second is faster."""

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.tuning import entries, entry_for, remembered


def library_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x `[M, K]`, weight `[N, K]`, bias `[N]` -> `x @ weight.T + bias`, `[M, N]` like x, summed in float32.

    torch's choice between the two is the process's: no other thread may multiply meanwhile.
    """
    if not is_lt_faster(x.device, x.dtype, x.shape[0], *weight.shape):
        return F.linear(x, weight, bias)
    with preferring("cublaslt"):
        return F.linear(x, weight, bias)


@contextlib.contextmanager
def preferring(library: Literal["cublas", "cublaslt"]) -> Iterator[None]:
    """Products within are this library's."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@remembered
def is_lt_faster(device: torch.device, dtype: torch.dtype, rows: int, columns: int, size: int) -> bool:
    """By the entry for the least measured number of rows that is not below `rows`; never for more, which tensor cores bind."""
    return bool(entry_for(entries(device, dtype, "library", f"{columns}x{size}"), rows))
