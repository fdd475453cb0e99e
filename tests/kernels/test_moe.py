import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.moe import fixed_moe, moe, moe_add_norm, moe_add_norm_torch, moe_add_norm_triton, moe_torch, moe_triton
from kernels.moe_grouped import GroupedConfig
from kernels.rms_norm import add_rms_norm_triton
from kernels.routing import assign_triton, route_torch, route_triton
from tests.kernels.support import DEVICE, DTYPES, INTERPRETED, ON_GPU, assert_near, implementations, randn

kernels_only = pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="of the kernels alone")


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


@kernels_only
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("tokens", [1, 130])
def test_every_assignment_stands_with_its_expert_in_order(tokens, by_token):
    logits = randn(tokens, 12, seed=1, dtype=torch.float16)
    weights, chosen = route_torch(logits, 3, False)
    probabilities, order, counts = assign_triton(logits, 3, False, by_token)
    assert_near(probabilities, weights, ulps=8)
    for expert, count in enumerate(counts.tolist()):
        assert order[expert, :count].tolist() == (chosen.flatten() == expert).nonzero().flatten().tolist()


@pytest.mark.skipif(not ON_GPU, reason="NumPy warns of what is no number")
@pytest.mark.parametrize("by_token", [False, True])
def test_tokens_that_are_not_numbers_have_experts_all_the_same(by_token):
    logits = randn(5, 60, seed=1)
    logits[1, 3], logits[3] = torch.nan, torch.nan
    probabilities, order, counts = assign_triton(logits, 4, False, by_token)
    assigned = torch.cat([order[expert, :count] for expert, count in enumerate(counts.tolist())])
    assert assigned.sort().values.tolist() == list(range(20))
    assert probabilities[3].isnan().all()


def mixture(x: Tensor, gate_up: Tensor, down: Tensor, logits: Tensor, choices: int, renormalise: bool) -> Tensor:
    weights, experts = route_torch(logits, choices, renormalise)
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    gate, up = torch.einsum("td,tcid->tci", x, gate_up[experts.long()]).chunk(2, dim=-1)
    results = torch.einsum("tci,tcdi->tcd", F.silu(gate) * up, down[experts.long()])
    return (results * weights.double()[..., None]).sum(dim=1)


def arguments(
    tokens: int, hidden: int, inner: int, experts: int, choices: int, dtype: torch.dtype, renormalise: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, bool]:
    """Of `moe`."""
    gate_up = randn(experts, 2 * inner, hidden, seed=1, dtype=dtype) / hidden**0.5
    down = randn(experts, hidden, inner, seed=2, dtype=dtype) / inner**0.5
    logits = 2 * randn(tokens, experts, seed=3, dtype=dtype)
    return randn(tokens, hidden, seed=tokens, dtype=dtype), gate_up, down, logits, choices, renormalise


@pytest.mark.parametrize("implementation", implementations(moe_torch, moe_triton))
@pytest.mark.parametrize(
    "tokens, hidden, inner, experts, choices",
    [(0, 64, 32, 4, 2), (1, 64, 48, 8, 2), (7, 96, 32, 20, 4), (50, 80, 40, 3, 3), (400 if ON_GPU else 70, 64, 64, 2, 1)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64(implementation, tokens, hidden, inner, experts, choices, dtype):
    given = arguments(tokens, hidden, inner, experts, choices, dtype)
    assert_near(implementation(*given), mixture(*given), ulps=4, floor=1e-5)


@pytest.mark.parametrize("implementation", implementations(moe_add_norm_torch, moe_add_norm_triton))
@pytest.mark.parametrize("tokens, hidden, inner, experts, choices", [(0, 64, 32, 4, 2), (1, 64, 48, 8, 2), (7, 97, 32, 12, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_takes_the_mixture_and_the_norm_sees_it_rounded(implementation, tokens, hidden, inner, experts, choices, dtype):
    given = arguments(tokens, hidden, inner, experts, choices, dtype)
    before, weight = randn(tokens, hidden, seed=4, dtype=dtype), randn(hidden, seed=5, dtype=dtype)
    residual = before.clone()
    normed = implementation(*given, residual, weight, 1e-6)
    assert_near(residual, before.double() + mixture(*given), ulps=4, floor=1e-5)
    total = residual.double()
    assert_near(normed, total / (total.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * weight.double(), ulps=1, floor=4e-6)


@kernels_only
@pytest.mark.parametrize("dtype", DTYPES)
def test_with_the_norm_the_bits_are_those_of_the_two_apart(dtype):
    given = arguments(5, 80, 48, 6, 3, dtype)
    residual, weight = randn(5, 80, seed=4, dtype=dtype), randn(80, seed=5, dtype=dtype)
    expected_residual = residual.clone()
    expected = add_rms_norm_triton(moe_triton(*given), expected_residual, weight, 1e-6)
    assert moe_add_norm_triton(*given, residual, weight, 1e-6).equal(expected)
    assert residual.equal(expected_residual)


@kernels_only
@pytest.mark.parametrize(
    "tuned, renormalise",
    [
        ((GroupedConfig(16, 32, 64, 4, 3, 0, 2, 0), GroupedConfig(8, 64, 32, 4, 2, 1, 0, 1)), False),
        ((GroupedConfig(64, 32, 32, 4, 3, 1, 0, 0), GroupedConfig(16, 64, 16, 4, 3, 0, 2, 1)), True),
    ],
)
def test_every_kind_of_configuration_matches_float64(tuned, renormalise):
    for dtype in DTYPES:
        if dtype.itemsize == 2:
            given = arguments(2, 40, 24, 6, 3, dtype, renormalise)
            assert_near(moe_triton(*given, tuned), mixture(*given), ulps=4, floor=1e-5)


@kernels_only
def test_all_tokens_on_one_expert():
    x, gate_up, down, logits, choices, renormalise = arguments(40, 64, 32, 6, 1, torch.float32)
    logits[:, 4] = 50
    expected = mixture(x, gate_up, down, logits, choices, renormalise)
    assert_near(moe_triton(x, gate_up, down, logits, choices, renormalise), expected, ulps=4, floor=1e-5)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter has one order for every shape")
def test_with_fixed_tiles_a_token_does_not_depend_on_the_others():
    x, gate_up, down, logits, choices, renormalise = arguments(700, 256, 128, 16, 4, torch.bfloat16)
    whole = fixed_moe(x, gate_up, down, logits, choices, renormalise)
    for part in (slice(0, 1), slice(3, 90), slice(100, 700)):
        assert fixed_moe(x[part], gate_up, down, logits[part], choices, renormalise).equal(whole[part])


def test_refuses_strided_weights():
    weight = torch.zeros(2, 4, 4, device=DEVICE)
    with pytest.raises(ValueError, match="down must be contiguous"):
        moe(weight[0], weight, weight.transpose(1, 2), torch.zeros(4, 2, device=DEVICE), 1, True)


def test_refuses_a_strided_residual():
    x, gate_up, down = (torch.zeros(shape, device=DEVICE) for shape in ((4, 4), (2, 8, 4), (2, 4, 4)))
    with pytest.raises(ValueError, match="residual must be contiguous"):
        moe_add_norm(x, gate_up, down, torch.zeros(4, 2, device=DEVICE), 1, True, x.T, torch.zeros(4, device=DEVICE), 1e-6)
