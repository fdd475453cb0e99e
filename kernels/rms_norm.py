"""RMSNorm, alone and fused with the residual addition before it. T tokens, D normalised size."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x `[..., D]`, weight `[D]` -> contiguous, like x: `x / rms(x) * weight` over the last dimension, in float32."""
    return rms_norm_torch(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x `[T, D]` to residual `[T, D]` IN PLACE and returns the RMSNorm of the sum, `[T, D]` like x.

    The sum is rounded to residual's dtype before it is normalised, so that the norm sees what the next layer sees.
    """
    return add_rms_norm_torch(x, residual, weight, eps)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = x.float()
    scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return (values * scale * weight.float()).to(x.dtype)


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    residual.copy_(residual.float() + x.float())
    return rms_norm_torch(residual, weight, eps).to(x.dtype)
