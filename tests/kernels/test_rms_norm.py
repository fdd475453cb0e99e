import pytest
import torch
from torch import Tensor

from kernels.rms_norm import add_rms_norm, add_rms_norm_torch, add_rms_norm_triton, rms_norm_torch, rms_norm_triton
from tests.kernels.support import DEVICE, DTYPES, assert_near, implementations, randn

SHAPES = [(0, 64), (1, 1), (1, 1536), (3, 129), (17, 4097), (111, 64)]
EPS = 1e-6


def expected_norm(x: Tensor, weight: Tensor) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("implementation", implementations(rms_norm_torch, rms_norm_triton))
@pytest.mark.parametrize("tokens, size", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64(implementation, tokens, size, dtype):
    x, weight = randn(tokens, size, seed=tokens + size, dtype=dtype), randn(size, seed=1, dtype=dtype)
    assert_near(implementation(x, weight, EPS), expected_norm(x, weight), ulps=1, floor=4e-6)


@pytest.mark.parametrize("implementation", implementations(rms_norm_torch, rms_norm_triton))
def test_norms_each_head_of_a_strided_view(implementation):
    x = randn(5, 7, 80, seed=1)[:, 2:5]
    weight = randn(80, seed=2)
    y = implementation(x, weight, EPS)
    assert y.is_contiguous()
    assert_near(y, expected_norm(x, weight), ulps=1, floor=4e-6)


@pytest.mark.parametrize("implementation", implementations(add_rms_norm_torch, add_rms_norm_triton))
@pytest.mark.parametrize("tokens, size", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_takes_the_sum_and_the_norm_sees_it_rounded(implementation, tokens, size, dtype):
    x, residual = randn(tokens, size, seed=tokens + size, dtype=dtype), randn(tokens, size, seed=3, dtype=dtype)
    weight, total = randn(size, seed=1, dtype=dtype), (x.float() + residual.float()).to(dtype)
    y = implementation(x, residual, weight, EPS)
    assert residual.equal(total)
    assert_near(y, expected_norm(total, weight), ulps=1, floor=4e-6)


def test_refuses_a_strided_residual():
    with pytest.raises(ValueError, match="residual must be contiguous"):
        add_rms_norm(torch.zeros(2, 4, device=DEVICE), torch.zeros(4, 2, device=DEVICE).T, torch.zeros(4, device=DEVICE), EPS)
