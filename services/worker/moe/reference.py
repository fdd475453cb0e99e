"""Mixture of experts, plainly: every expert computes every token. T tokens, D hidden size, E experts, N of them a token, I their size."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.routing import route
from kernels.silu_and_mul import silu_and_mul


def every_expert(x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor, choices: int, renormalise: bool) -> Tensor:
    """Shapes and result as of `kernels.moe`."""
    weights, ids = route(logits, choices, renormalise)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(gate_up)):
        weight = weights.where(ids == expert, 0.0).sum(dim=1, keepdim=True)
        out += weight * F.linear(silu_and_mul(F.linear(x, gate_up[expert])), down[expert])
    return out.to(x.dtype)
