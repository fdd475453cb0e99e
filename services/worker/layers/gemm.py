"""Matrix products whose rows do not depend on each other, bit by bit. T tokens, D inputs, N outputs.

A library picks its order of additions by the shape of the whole product, so that a row's last bits change with the batch that
it is computed in. Here every product has the same shape: blocks of ROWS rows, the last one padded. On one thread, MKL then
rounds a row alike at every place of its block, but for products that no model has (N below 10 and 4 no divisor of D).
"""

import torch.nn.functional as F
from torch import Tensor

from kernels.silu_and_mul import silu_and_mul

ROWS = 32


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x `[T, D]`, weight `[N, D]`, bias `[N]` -> `[T, N]`."""
    out = x.new_empty(len(x), len(weight))
    for start in range(0, len(x), ROWS):
        part = padded(x[start : start + ROWS], ROWS)
        out[start : start + ROWS] = F.linear(part, weight, bias)[: len(x) - start]
    return out


def tiled_gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x `[T, D]`, weight `[2 * N, D]`, bias `[2 * N]` -> `[T, N]`; see `kernels.linear.gated_linear`."""
    return silu_and_mul(tiled_linear(x, weight, bias))


def tiled_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x `[B, D]`, weight `[V, D]` -> `[B, V]` float32."""
    return tiled_linear(x, weight, None).float()


def padded(x: Tensor, multiple: int) -> Tensor:
    """x `[T, ...]` with zeros after it, so that the multiple divides its length; contiguous."""
    missing = -len(x) % multiple
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)).contiguous() if missing else x.contiguous()
