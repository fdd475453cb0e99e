import pytest
import torch

from kernels.linear import begins_norm, config, gated_linear, linear, widened_linear
from kernels.skinny_linear import Config, widened_linear_triton
from tests.kernels.support import DEVICE, INTERPRETED, ON_GPU, assert_near, randn


@pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="takes the kernel")
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
