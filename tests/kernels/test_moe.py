import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.moe import moe, moe_torch, moe_triton, route_torch, route_triton
from tests.kernels.support import DEVICE, DTYPES, INTERPRETED, ON_GPU, assert_near, implementations, randn


@pytest.mark.parametrize("implementation", implementations(route_torch, route_triton))
@pytest.mark.parametrize("tokens, experts, choices", [(0, 8, 2), (1, 8, 8), (5, 60, 4), (17, 128, 8)])
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_routing_matches_float64(implementation, tokens, experts, choices, renormalise, dtype):
    logits = 2 * randn(tokens, experts, seed=tokens, dtype=dtype) - 50  # a softmax must not mind the shift
    weights, chosen = implementation(logits, choices, renormalise)
    probability = logits.double().softmax(dim=-1)
    order = torch.sort(logits.double(), dim=-1, descending=True, stable=True).indices[:, :choices]
    expected = probability.gather(1, order)
    if renormalise:
        expected = expected / expected.sum(dim=-1, keepdim=True)
    assert chosen.dtype == torch.int32
    assert chosen.equal(order.int())
    assert_near(weights, expected, ulps=8)


@pytest.mark.parametrize("implementation", implementations(route_torch, route_triton))
def test_equal_experts_are_taken_by_lowest_id(implementation):
    logits = torch.zeros(2, 8, device=DEVICE)
    logits[1, 5] = 1
    assert implementation(logits, 3, True)[1].tolist() == [[0, 1, 2], [5, 0, 1]]


def mixture(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    gate, up = torch.einsum("td,tcid->tci", x, gate_up[experts.long()]).chunk(2, dim=-1)
    results = torch.einsum("tci,tcdi->tcd", F.silu(gate) * up, down[experts.long()])
    return (results * weights.double()[..., None]).sum(dim=1)


@pytest.mark.parametrize("implementation", implementations(moe_torch, moe_triton))
@pytest.mark.parametrize(
    "tokens, hidden, inner, experts, choices",
    [(0, 64, 32, 4, 2), (1, 64, 48, 8, 2), (7, 96, 32, 60, 4), (50, 80, 40, 3, 3), (400 if ON_GPU else 70, 64, 64, 2, 1)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64(implementation, tokens, hidden, inner, experts, choices, dtype):
    x = randn(tokens, hidden, seed=tokens, dtype=dtype)
    gate_up = randn(experts, 2 * inner, hidden, seed=1, dtype=dtype) / hidden**0.5
    down = randn(experts, hidden, inner, seed=2, dtype=dtype) / inner**0.5
    weights, chosen = route_torch(2 * randn(tokens, experts, seed=3), choices, True)
    assert_near(implementation(x, gate_up, down, weights, chosen), mixture(x, gate_up, down, weights, chosen), ulps=4, floor=1e-5)


@pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="the reference does not promise it")
def test_all_tokens_on_one_expert():
    tokens, gate_up, down = 40, randn(6, 64, 64, seed=1) / 8, randn(6, 64, 32, seed=2) / 6
    x, weights = randn(tokens, 64, seed=3), torch.ones(tokens, 1, device=DEVICE)
    chosen = torch.full((tokens, 1), 4, dtype=torch.int32, device=DEVICE)
    assert_near(moe_triton(x, gate_up, down, weights, chosen), mixture(x, gate_up, down, weights, chosen), ulps=4, floor=1e-5)


def test_refuses_strided_weights():
    weight = torch.zeros(2, 4, 4, device=DEVICE)
    with pytest.raises(ValueError, match="down must be contiguous"):
        moe(
            weight[0], weight, weight.transpose(1, 2), torch.zeros(4, 1, device=DEVICE), torch.zeros(4, 1, dtype=torch.int32, device=DEVICE)
        )
