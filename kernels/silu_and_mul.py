"""The gated activation of an MLP: SiLU of the gate times the up projection. T tokens, D intermediate size of this rank."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """x `[T, 2 * D]`, the gate's columns before the up projection's, T may be 0 -> `[T, D]` like x, computed in float32.

    Raises ValueError if the last dimension is odd or x is not contiguous.
    """
    if x.dim() != 2 or x.shape[1] % 2 or not x.is_contiguous():
        raise ValueError(f"x must be a contiguous [T, 2 * D], got {tuple(x.shape)} with strides {x.stride()}")
    return silu_and_mul_torch(x)


def silu_and_mul_torch(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=1)
    return (F.silu(gate) * up).to(x.dtype)
