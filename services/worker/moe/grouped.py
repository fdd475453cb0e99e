"""Mixture of experts with the tokens sorted by expert, a pair of GEMMs for each that was chosen: the one for CPUs.

T tokens, D hidden size, E experts, N of them a token, I their size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.routing import route
from kernels.silu_and_mul import silu_and_mul


def grouped(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    logits: Tensor,
    choices: int,
    renormalise: bool,
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """Shapes and result as of `kernels.moe`. The counts are read on the host: not for a captured graph."""
    weights, ids = route(logits, choices, renormalise)
    order = ids.flatten().argsort(stable=True)
    inputs = x[order // ids.shape[1]]
    counts = ids.flatten().bincount(minlength=len(gate_up)).tolist()
    parts = [
        linear(silu_and_mul(linear(part, gate_up[expert], None)), down[expert], None)
        for expert, part in enumerate(inputs.split(counts))
        if len(part)
    ]
    outputs = torch.empty_like(inputs)
    outputs[order] = torch.cat(parts)
    shares = outputs.view(*ids.shape, -1) * weights[..., None]
    out = shares[:, 0]
    for rank in range(1, ids.shape[1]):  # in a fixed order: a token's bits do not depend on the batch
        out = out + shares[:, rank]
    return out.to(x.dtype)
