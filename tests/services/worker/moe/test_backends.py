"""Both ways to compute experts, against float64 and against each other's promises."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.moe import moe
from kernels.routing import route_torch
from services.worker.layers.backends import ExpertsBackend
from services.worker.moe.grouped import grouped
from services.worker.moe.reference import every_expert

BACKENDS: dict[str, ExpertsBackend] = {"reference": every_expert, "grouped": partial(grouped, linear=F.linear), "kernel": moe}


def expected(x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor, choices: int, renormalise: bool) -> Tensor:
    weights, ids = route_torch(logits, choices, renormalise)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights.double(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += share * (down[expert].double() @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens, experts, chosen, size", [(1, 8, 3, 24), (5, 4, 4, 7), (37, 16, 1, 33), (64, 128, 8, 8)])
def test_matches_float64(backend: str, tokens: int, experts: int, chosen: int, size: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 32, generator=generator)
    gate_up, down = (torch.randn(experts, *shape, generator=generator) for shape in ((2 * size, 32), (32, size)))
    logits = torch.randn(tokens, experts, generator=generator)
    got = BACKENDS[backend](x, gate_up, down, logits, chosen, False)
    torch.testing.assert_close(got.double(), expected(x, gate_up, down, logits, chosen, False), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expert_that_all_tokens_choose_and_ones_that_none_does(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate_up, down = (torch.randn(shape, generator=generator) for shape in ((6, 16), (5, 24, 16), (5, 16, 12)))
    down[3] = torch.nan  # of an expert without tokens
    logits = torch.rand(6, 5, generator=generator) + torch.tensor([10, 0, 0, 0, 20])
    got = BACKENDS[backend](x, gate_up, down, logits, 2, True)
    if backend == "reference":
        assert got.isnan().all()  # it computes them all the same
    else:
        torch.testing.assert_close(got.double(), expected(x, gate_up, down, logits, 2, True), rtol=1e-4, atol=1e-4)
