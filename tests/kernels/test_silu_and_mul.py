import pytest
import torch

from kernels.silu_and_mul import silu_and_mul, silu_and_mul_torch, silu_and_mul_triton
from tests.kernels.support import DEVICE, DTYPES, assert_near, implementations, randn


@pytest.mark.parametrize("implementation", implementations(silu_and_mul_torch, silu_and_mul_triton))
@pytest.mark.parametrize("tokens, size", [(0, 64), (1, 1), (1, 1536), (3, 129), (17, 4097)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64(implementation, tokens, size, dtype):
    x = 3 * randn(tokens, 2 * size, seed=tokens + size, dtype=dtype)
    gate, up = x.double().chunk(2, dim=1)
    assert_near(implementation(x), gate / (1 + (-gate).exp()) * up, ulps=1)


@pytest.mark.parametrize("x", [torch.zeros(2, 3, device=DEVICE), torch.zeros(8, 2, device=DEVICE).T])
def test_refuses_other_layouts(x):
    with pytest.raises(ValueError, match=r"contiguous \[T, 2 \* D\]"):
        silu_and_mul(x)
