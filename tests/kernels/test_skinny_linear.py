import pytest
import torch

from kernels.linear import gated_linear_torch, linear_add_norm_torch, linear_torch
from kernels.skinny_linear import Config, gated_linear_triton, linear_add_norm_triton, linear_triton, widened_linear_triton
from tests.kernels.support import DTYPES, INTERPRETED, ON_GPU, assert_near, randn

pytestmark = pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="tests the kernel beside its reference")

# One row without tensor cores, tiles larger than the product, shares and tiles that are not full, several tiles of rows.
CASES = [
    (1, 40, 96, Config(1, 8, 64, 1, 4, 2, 1)),
    (2, 48, 256, Config(1, 16, 64, 2, 4, 2, 2)),
    (2, 48, 256, Config(1, 16, 64, 2, 4, 1, 0)),  # two steps a share, whose weights are in registers
    (3, 33, 104, Config(16, 16, 32, 3, 4, 2, 1)),
    (5, 24, 50, Config(16, 16, 16, 1, 4, 2, 2)),
    (20, 64, 128, Config(32, 32, 32, 4, 4, 2, 1)),
    (37, 70, 128, Config(16, 32, 64, 1, 4, 3, 2)),
    (64, 128, 192, Config(64, 32, 64, 2, 4, 3, 0)),
    (100, 48, 64, Config(128, 64, 32, 1, 8, 3, 0, weights_first=1, width=40)),
    (5, 72, 128, Config(8, 64, 32, 2, 4, 2, 1, weights_first=1)),
    (5, 75, 160, Config(8, 64, 32, 3, 4, 2, 1, weights_first=1, width=38)),  # narrow tiles, and shares of two steps, two and one
    (3, 70, 160, Config(16, 32, 32, 4, 4, 2, 2, width=17)),  # the last share is empty
    (3, 64, 64, Config(16, 32, 32, 1, 4, 2, 0, width=24)),  # blocks divide the columns, tiles do not
]
# Of two products: a row by each of the vector ways, tiles with and without shares, columns that do not fill the last tile; biases or not.
PAIRS = [
    (1, 40, Config(1, 8, 64, 1, 4, 2, 1), Config(1, 8, 64, 1, 4, 2, 1), False),
    (2, 128, Config(1, 16, 128, 1, 4, 1, 0), Config(1, 16, 64, 2, 4, 1, 0), True),
    (5, 72, Config(16, 16, 32, 3, 4, 2, 1), Config(8, 64, 32, 1, 4, 2, 1, weights_first=1), True),
    (20, 80, Config(8, 64, 32, 1, 4, 2, 1, weights_first=1), Config(32, 16, 32, 2, 4, 2, 1), False),
    (5, 75, Config(8, 64, 32, 2, 4, 2, 1, weights_first=1, width=33), Config(16, 32, 32, 1, 4, 2, 0, width=20), True),
]
EPS = 1e-6


@pytest.mark.parametrize("rows, columns, size, tuned", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_matches_float64(rows, columns, size, tuned, dtype, biased):
    x, weight = randn(rows, size, seed=1, dtype=dtype), randn(columns, size, seed=2, dtype=dtype) / size**0.5
    bias = randn(columns, seed=3, dtype=dtype) if biased else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert_near(linear_triton(x, weight, bias, tuned), expected, ulps=1, floor=2e-6)
    assert_near(linear_torch(x, weight, bias), expected, ulps=1, floor=2e-6)


@pytest.mark.parametrize("rows, columns, size, tuned", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_gated_linear_matches_float64(rows, columns, size, tuned, dtype, biased):
    x, weight = randn(rows, size, seed=1, dtype=dtype), randn(2 * columns, size, seed=2, dtype=dtype) / size**0.5
    bias = randn(2 * columns, seed=3, dtype=dtype) if biased else None
    gate, up = (x.double() @ weight.double().T + (0 if bias is None else bias.double())).chunk(2, dim=1)
    expected = gate / (1 + (-gate).exp()) * up
    assert_near(gated_linear_triton(x, weight, bias, tuned), expected, ulps=2, floor=1e-5)
    assert_near(gated_linear_torch(x, weight, bias), expected, ulps=2, floor=1e-5)


@pytest.mark.parametrize("rows, columns, size, tuned", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_widened_linear_is_not_rounded(rows, columns, size, tuned, dtype):
    x, weight = randn(rows, size, seed=1, dtype=dtype), randn(columns, size, seed=2, dtype=dtype) / size**0.5
    y = widened_linear_triton(x, weight, tuned)
    assert y.dtype == torch.float32
    assert_near(y, x.double() @ weight.double().T, ulps=8, floor=2e-6)


@pytest.mark.parametrize("rows, hidden, writer, reader, biased", PAIRS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_two_products_make_the_norm_between_them(rows, hidden, writer, reader, biased, dtype):
    x, first, norm = randn(rows, 128, seed=1, dtype=dtype), randn(hidden, 128, seed=2, dtype=dtype) / 11, randn(hidden, seed=3, dtype=dtype)
    second, residual = randn(48, hidden, seed=4, dtype=dtype) / hidden**0.5, 3 * randn(rows, hidden, seed=5, dtype=dtype)
    biases = [randn(size, seed=6, dtype=dtype) if biased else None for size in (hidden, 48)]
    total = (residual.float() + linear_triton(x, first, biases[0], writer).float()).to(dtype)
    normed = total.double() * torch.rsqrt(total.double().square().mean(dim=1, keepdim=True) + EPS) * norm.double()
    expected = normed @ second.double().T + (0 if biases[1] is None else biases[1].double())
    gate, up = expected.chunk(2, dim=1)

    kept = residual.clone()
    unscaled = linear_add_norm_triton(x, first, biases[0], residual, norm, EPS, writer)
    assert residual.equal(total)
    assert_near(linear_triton(unscaled, second, biases[1], reader), expected, ulps=4, floor=1e-5)
    assert_near(gated_linear_triton(unscaled, second, biases[1], reader), gate / (1 + (-gate).exp()) * up, ulps=8, floor=1e-5)
    unscaled = linear_add_norm_torch(x, first, biases[0], kept, norm, EPS)
    assert_near(kept, total.double(), ulps=2, floor=1e-5)
    assert_near(linear_torch(unscaled, second, biases[1]), expected, ulps=8, floor=1e-5)


@pytest.mark.parametrize("strided", [False, True])
def test_shares_are_added_in_one_order(strided):
    x, weight = randn(8, 512, seed=1, dtype=torch.float16), randn(48, 256, seed=2, dtype=torch.float16)
    x = x[:, 128:384] if strided else x[:, :256].contiguous()
    tuned = Config(16, 16, 32, 4, 4, 2, 1)
    first = linear_triton(x, weight, None, tuned)
    assert_near(first / 16, (x.double() @ weight.double().T) / 16, ulps=1)
    for _ in range(20 if ON_GPU else 1):  # leaves its counters at zero, too
        assert linear_triton(x, weight, None, tuned).equal(first)


def test_refuses_strided_weights():
    with pytest.raises(ValueError, match="weight be contiguous"):
        linear_triton(randn(1, 16, seed=1), randn(16, 16, seed=2).T, None, Config(16, 16, 16, 1, 4, 1, 0))
