import pytest
import torch
from torch import Tensor

from kernels.rms_norm import add_rms_norm_triton
from kernels.weighted_sum import weighted_sum_add_norm_triton, weighted_sum_triton
from tests.kernels.support import DEVICE, DTYPES, INTERPRETED, ON_GPU, assert_near, randn

pytestmark = pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="of the kernels alone")

# Odd sizes, several rows of a program with some beyond the last, choices that are no power of two, and Qwen3-30B-A3B's.
SHAPES = [(1, 1, 1), (3, 129, 3), (37, 64, 5), (2, 4097, 2), (4, 2048, 8)]
EPS = 1e-6


def results_of(tokens: int, size: int, choices: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the experts made, and their masses."""
    masses = torch.rand(tokens, choices, generator=torch.Generator().manual_seed(tokens)) + 0.01
    return randn(tokens * choices, size, seed=tokens + size, dtype=dtype), masses.to(DEVICE)


@pytest.mark.parametrize("tokens, size, choices", SHAPES)
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64(tokens, size, choices, renormalise, dtype):
    results, masses = results_of(tokens, size, choices, dtype)
    weights = masses.double() / (masses.double().sum(dim=1, keepdim=True) if renormalise else 1)
    expected = (results.view(tokens, choices, size).double() * weights[..., None]).sum(dim=1)
    assert_near(weighted_sum_triton(results, masses, renormalise), expected, ulps=2)


@pytest.mark.parametrize("tokens, size, choices", SHAPES)
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_with_the_norm_the_bits_are_those_of_the_two_apart(tokens, size, choices, renormalise, dtype):
    results, masses = results_of(tokens, size, choices, dtype)
    residual, weight = randn(tokens, size, seed=3, dtype=dtype), randn(size, seed=1, dtype=dtype)
    expected_residual = residual.clone()
    expected = add_rms_norm_triton(weighted_sum_triton(results, masses, renormalise), expected_residual, weight, EPS)
    assert weighted_sum_add_norm_triton(results, masses, renormalise, residual, weight, EPS).equal(expected)
    assert residual.equal(expected_residual)


def test_a_row_does_not_depend_on_the_others():
    results, masses = results_of(19, 192, 4, torch.float16)
    residual, weight = randn(19, 192, seed=3, dtype=torch.float16), randn(192, seed=1, dtype=torch.float16)
    for row in (0, 7, 18):
        given = results[4 * row :][:4], masses[row : row + 1], True
        alone = weighted_sum_add_norm_triton(*given, residual[row : row + 1].clone(), weight, EPS)
        assert alone.equal(weighted_sum_add_norm_triton(results, masses, True, residual.clone(), weight, EPS)[row : row + 1])
