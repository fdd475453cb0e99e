"""Mixture of experts, plainly: every expert computes every token. T tokens, D hidden size, E experts, N of them a token, I their size."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.silu_and_mul import silu_and_mul


def every_expert(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """x `[T, D]`, gate_up `[E, 2 * I, D]`, down `[E, D, I]`, weights `[T, N]` float32, ids `[T, N]` integers -> `[T, D]` like x.

    The sum over a token's experts of weight times gated MLP, added up in float32.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(gate_up)):
        weight = weights.where(ids == expert, 0.0).sum(dim=1, keepdim=True)
        out += weight * F.linear(silu_and_mul(F.linear(x, gate_up[expert])), down[expert])
    return out.to(x.dtype)
