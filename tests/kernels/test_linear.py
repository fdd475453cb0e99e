import pytest
import torch

from kernels.linear import (
    Config,
    begins_norm,
    config,
    gated_linear,
    gated_linear_torch,
    gated_linear_triton,
    linear,
    linear_add_norm_torch,
    linear_add_norm_triton,
    linear_torch,
    linear_triton,
    widened_linear,
    widened_linear_triton,
)
from tests.kernels.support import DEVICE, DTYPES, INTERPRETED, ON_GPU, assert_near, randn

KERNELS = pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="tests the kernel beside its reference")
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


@KERNELS
@pytest.mark.parametrize("rows, columns, size, tuned", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_matches_float64(rows, columns, size, tuned, dtype, biased):
    x, weight = randn(rows, size, seed=1, dtype=dtype), randn(columns, size, seed=2, dtype=dtype) / size**0.5
    bias = randn(columns, seed=3, dtype=dtype) if biased else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert_near(linear_triton(x, weight, bias, tuned), expected, ulps=1, floor=2e-6)
    assert_near(linear_torch(x, weight, bias), expected, ulps=1, floor=2e-6)


@KERNELS
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


@KERNELS
@pytest.mark.parametrize("rows, columns, size, tuned", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_widened_linear_is_not_rounded(rows, columns, size, tuned, dtype):
    x, weight = randn(rows, size, seed=1, dtype=dtype), randn(columns, size, seed=2, dtype=dtype) / size**0.5
    y = widened_linear_triton(x, weight, tuned)
    assert y.dtype == torch.float32
    assert_near(y, x.double() @ weight.double().T, ulps=8, floor=2e-6)


@KERNELS
def test_widened_linear_takes_the_kernel_for_the_rows_of_an_entry(table):
    table["linear"] = {"40x256": {"8": [16, 16, 64, 1, 4, 2, 0]}}
    rows = randn(9, 512, seed=1, dtype=torch.float16)
    x, weight = rows[:, 128:384], randn(40, 256, seed=2, dtype=torch.float16) / 16
    assert widened_linear(x[:8], weight).equal(widened_linear_triton(x[:8], weight, Config(16, 16, 64, 1, 4, 2, 0)))
    assert_near(widened_linear(x[:8], weight), x[:8].double() @ weight.double().T, ulps=64)  # half precision is 2**13 times coarser
    assert config("linear", DEVICE, torch.float16, 9, 40, 256) is None


def test_widened_linear_without_an_entry_is_float32():
    x, weight = randn(3, 32, seed=1), randn(40, 32, seed=2)
    y = widened_linear(x, weight)
    assert y.dtype == torch.float32
    assert_near(y, x.double() @ weight.double().T, ulps=8, floor=2e-6)


@KERNELS
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


@KERNELS
@pytest.mark.parametrize("strided", [False, True])
def test_shares_are_added_in_one_order(strided):
    x, weight = randn(8, 512, seed=1, dtype=torch.float16), randn(48, 256, seed=2, dtype=torch.float16)
    x = x[:, 128:384] if strided else x[:, :256].contiguous()
    tuned = Config(16, 16, 32, 4, 4, 2, 1)
    first = linear_triton(x, weight, None, tuned)
    assert_near(first / 16, (x.double() @ weight.double().T) / 16, ulps=1)
    for _ in range(20 if ON_GPU else 1):  # leaves its counters at zero, too
        assert linear_triton(x, weight, None, tuned).equal(first)


def test_without_an_entry_the_library_computes():
    x, weight, bias = randn(5, 32, seed=1), randn(24, 32, seed=2), randn(24, seed=3)
    assert_near(linear(x, weight, bias), x.double() @ weight.double().T + bias, ulps=8)
    gate, up = (x.double() @ weight.double().T + bias).chunk(2, dim=1)
    assert_near(gated_linear(x, weight, bias), gate / (1 + (-gate).exp()) * up, ulps=16)
    assert linear(torch.zeros(0, 32, device=DEVICE), weight).shape == (0, 24)


def test_an_entry_serves_up_to_its_rows_in_half_precision(table):
    table["linear"] = {"64x1024": {"1": [1, 8, 1024, 1, 4, 1, 0], "8": [], "16": [16, 16, 256, 1, 4, 3, 0]}}

    def row_block(rows: int, columns: int = 64, dtype: torch.dtype = torch.bfloat16) -> int | None:
        found = config("linear", DEVICE, dtype, rows, columns, 1024)
        return found and found.row_block

    assert [row_block(rows) for rows in (0, 1, 2, 8, 9, 16, 17, 65)] == [None, 1, None, None, 16, 16, None, None]
    assert row_block(1, columns=65) is None
    assert row_block(1, dtype=torch.float32) is None


def test_a_norm_is_begun_where_both_products_are_the_kernels_and_the_table_says_so(table):
    plain, reads = [1, 8, 64, 1, 4, 1, 0], [1, 8, 64, 1, 4, 1, 0, 0, 1]
    table["linear"] = {"64x32": {"1": plain, "16": []}, "96x64": {"16": reads}}
    table["gated_linear"] = {"96x64": {"1": plain, "16": reads}}
    weight, reader = torch.zeros(64, 32, dtype=torch.bfloat16), torch.zeros(192, 64, dtype=torch.bfloat16)

    def begins(rows: int, gated: bool, dtype: torch.dtype = torch.bfloat16) -> bool:
        return begins_norm(torch.zeros(rows, 32, dtype=dtype), weight, reader if gated else reader[:96], gated)

    assert begins(1, gated=False)
    assert not begins(1, gated=True)  # as the table says
    assert not begins(2, gated=True)  # the first product is the library's
    assert not begins(1, gated=False, dtype=torch.float16)


@KERNELS
def test_refuses_strided_weights():
    with pytest.raises(ValueError, match="weight be contiguous"):
        linear_triton(randn(1, 16, seed=1), randn(16, 16, seed=2).T, None, Config(16, 16, 16, 1, 4, 1, 0))
