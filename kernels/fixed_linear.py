"""Matrix products whose rows do not depend, bit by bit, on how many there are: one shape of tile for one row as for thousands, and every
sum over the inner size in one piece. For deterministic mode; `kernels.linear` and the library choose by the number of rows, and are faster.

M rows, N columns (outputs), K inner size. That a row's place in a tile changes nothing is a property of the matrix instructions, which
`tests/gpu/test_deterministic.py` holds them to.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, next_power_of_2, pdl_options
from kernels.skinny_linear import activated

ROW_TILES = 8  # that share the columns' weights in the cache: programs are numbered through these first


class Config(NamedTuple):
    row_block: int
    column_block: int  # gate and up each
    inner_block: int
    warps: int
    stages: int


def config(columns: int, gated: bool, element_bytes: int) -> Config:
    """By the weight's shape alone: enough programs for one tile of rows to fill a GPU, as far as columns go."""
    if element_bytes == 4:
        return Config(16, 32, 32, 4, 1)
    wide = min(max(next_power_of_2(columns // 128), 32), 64 if gated else 128)
    if wide == 32:
        return Config(64, 32, 128, 4, 3 if gated else 5)
    return Config(64, wide, 64, 4, 4) if gated or wide == 128 else Config(64, wide, 128, 4, 3)


def fixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x `[M, K]`, weight `[N, K]`, bias `[N]` -> `x @ weight.T + bias`, `[M, N]`, summed in float32; of `dtype`, or like x.

    On a GPU only. Raises ValueError if the rows of x or weight are not contiguous.
    """
    return _launch(x, weight, bias, False, dtype or x.dtype)


def fixed_gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x `[M, K]`, weight `[2 * N, K]` and bias `[2 * N]` -> `[M, N]` like x; see `kernels.linear.gated_linear`. On a GPU only."""
    return _launch(x, weight, bias, True, x.dtype)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, dtype: torch.dtype) -> Tensor:
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"x must have contiguous rows and weight be contiguous, got strides {x.stride()} and {weight.stride()}")
    (rows, size), columns = x.shape, weight.shape[0] // (2 if gated else 1)
    y = torch.empty(rows, columns, dtype=dtype, device=x.device)
    if rows:
        tuned = config(columns, gated, x.element_size())
        row_tiles, column_tiles = cdiv(rows, tuned.row_block), cdiv(columns, tuned.column_block)
        even = size % tuned.inner_block == 0 and columns % tuned.column_block == 0
        _fixed_linear_kernel[(row_tiles * column_tiles,)](
            x, weight, bias, y, rows, row_tiles, columns, size, x.stride(0), gated, bias is not None, even, tuned.row_block,
            tuned.column_block, tuned.inner_block, tuned.stages, ROW_TILES, num_warps=tuned.warps, **pdl_options(x.device),
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["rows", "row_tiles"])  # one kernel for all numbers of rows
def _fixed_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, rows, row_tiles, columns, size, row_stride, GATED: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """EVEN: steps and tiles are full, so that weights need no mask."""
    column_tiles = tl.cdiv(columns, COLUMNS)
    first_row_tile = tl.program_id(0) // (GROUP * column_tiles) * GROUP
    group = tl.minimum(row_tiles - first_row_tile, GROUP)
    place = tl.program_id(0) - first_row_tile * column_tiles
    row = (first_row_tile + place % group) * ROWS + tl.arange(0, ROWS)
    column = place // group * COLUMNS + tl.arange(0, COLUMNS)
    in_rows, in_columns = row < rows, column < columns
    x_row_ptr = x_ptr + row.to(tl.int64)[:, None] * row_stride
    gate_ptr = weight_ptr + column.to(tl.int64)[:, None] * size
    up_ptr = weight_ptr + (column.to(tl.int64) + columns)[:, None] * size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    total_up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, size, INNER, num_stages=STAGES):
        inner = start + tl.arange(0, INNER)[None, :]
        in_weight = None if EVEN else in_columns[:, None] & (inner < size)
        x = tl.load(x_row_ptr + inner, mask=in_rows[:, None] if EVEN else in_rows[:, None] & (inner < size), other=0.0)
        gate = tl.load(gate_ptr + inner, mask=in_weight, other=None if EVEN else 0.0)
        total = tl.dot(x, tl.trans(gate), total, input_precision="ieee")
        if GATED:
            up = tl.load(up_ptr + inner, mask=in_weight, other=None if EVEN else 0.0)
            total_up = tl.dot(x, tl.trans(up), total_up, input_precision="ieee")
    total = activated(total, total_up, bias_ptr, column, columns, GATED, BIAS)
    tl.store(y_ptr + row.to(tl.int64)[:, None] * columns + column[None, :], total, mask=in_rows[:, None] & in_columns[None, :])
