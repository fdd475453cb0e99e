import pytest
import torch

from kernels.fixed_linear import fixed_gated_linear, fixed_linear
from tests.kernels.support import DTYPES, INTERPRETED, ON_GPU, assert_near, randn

pytestmark = pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="tests a kernel")
# Tiles that are not full in any direction, and more row tiles than share weights.
CASES = [(1, 40, 96, True), (3, 33, 104, False), (70, 64, 128, False), (600, 16, 32, True) if INTERPRETED else (1100, 5000, 200, True)]


@pytest.mark.parametrize("rows, columns, size, biased", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_match_float64(rows, columns, size, dtype, biased):
    x, weight = randn(rows, size, seed=1, dtype=dtype), randn(2 * columns, size, seed=2, dtype=dtype) / size**0.5
    bias = randn(2 * columns, seed=3, dtype=dtype) if biased else None
    product = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert_near(fixed_linear(x, weight, bias), product, ulps=1, floor=5e-6)
    assert_near(fixed_linear(x, weight, bias, torch.float32), product, ulps=1, floor=5e-6)
    gate, up = product.chunk(2, dim=1)
    assert_near(fixed_gated_linear(x, weight, bias), gate / (1 + (-gate).exp()) * up, ulps=2, floor=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="a property of the matrix instructions")
@pytest.mark.parametrize("columns, size", [(4096, 1024), (1024, 3072), (5120, 17408), (151936, 1024), (257, 104)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bit_by_bit_at_every_place(columns, size, dtype):
    rows = 700
    x, weight = randn(rows, size, seed=1, dtype=dtype), randn(columns, size, seed=2, dtype=dtype) / size**0.5
    together, gated = fixed_linear(x, weight, None, torch.float32), fixed_gated_linear(x, weight[: columns // 2 * 2])
    for part in (slice(0, 1), slice(699, 700), slice(63, 65), slice(17, 600), slice(500, 564)):
        assert torch.equal(fixed_linear(x[part], weight, None, torch.float32), together[part])
        assert torch.equal(fixed_gated_linear(x[part], weight[: columns // 2 * 2]), gated[part])
