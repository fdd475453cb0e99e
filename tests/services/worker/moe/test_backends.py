"""Both ways to compute experts, against float64 and against each other's promises."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.moe import moe
from services.worker.layers.backends import ExpertsBackend
from services.worker.moe.grouped import grouped
from services.worker.moe.reference import every_expert

BACKENDS: dict[str, ExpertsBackend] = {"reference": every_expert, "grouped": partial(grouped, linear=F.linear), "kernel": moe}


def expected(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
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
    ids = torch.stack([torch.randperm(experts, generator=generator)[:chosen] for _ in range(tokens)]).int()
    weights = torch.rand(tokens, chosen, generator=generator)
    got = BACKENDS[backend](x, gate_up, down, weights, ids)
    torch.testing.assert_close(got.double(), expected(x, gate_up, down, weights, ids), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expert_that_all_tokens_choose_and_ones_that_none_does(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate_up, down = (torch.randn(shape, generator=generator) for shape in ((6, 16), (5, 24, 16), (5, 16, 12)))
    down[3] = torch.nan  # of an expert without tokens
    ids = torch.tensor([[4, 0]] * 6, dtype=torch.int32)
    weights = torch.rand(6, 2, generator=generator)
    got = BACKENDS[backend](x, gate_up, down, weights, ids)
    if backend == "reference":
        assert got.isnan().all()  # it computes them all the same
    else:
        torch.testing.assert_close(got.double(), expected(x, gate_up, down, weights, ids), rtol=1e-4, atol=1e-4)
