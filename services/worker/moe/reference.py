"""Mixture of experts, plainly: every expert computes every token. T tokens, D hidden size, E experts, N of them a token, I their size."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.silu_and_mul import silu_and_mul


def every_expert(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """x `[T, D]`, ids `[T, N]` int64, weights `[T, N]` like x, gate_up `[E, 2 * I, D]`, down `[E, D, I]` -> `[T, D]`.

    The sum over a token's experts of weight times gated MLP.
    """
    out = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        weight = weights.where(ids == expert, 0.0).sum(dim=1, keepdim=True)
        out += weight * F.linear(silu_and_mul(F.linear(x, gate_up[expert])), down[expert])
    return out
