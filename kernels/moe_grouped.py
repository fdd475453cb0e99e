"""The experts' MLPs as matrix products over the tokens that chose each: four launches, five for many tokens.

T tokens, D hidden size, E experts, C experts a token, I intermediate size of an expert on this rank, A = T * C assignments.

Find each expert's assignments, gate and up with the activation, down, weighted sum; the host waits for none of them. The grids of the
products are bounds that shapes give; each program finds its expert from the counts on the device, and surplus programs end at once.
Neighbours share an expert's rows, and its weights where it has many. Nothing is added up in an order that could vary.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.launch import cdiv, next_power_of_2, pdl_options, prefetch
from kernels.routing import assign_triton
from kernels.skinny_linear import add_product
from kernels.weighted_sum import weighted_sum_triton

MOST_RANKED_TOKENS = 256  # beyond them a program for each expert, reading all logits, takes longer than two kernels

GUESSED_TILES = tl.constexpr(16)  # of rows: about what runs at a time


class GroupedConfig(NamedTuple):
    row_block: int  # assignments of a tile
    column_block: int  # output columns of a tile; gate and up each
    inner_block: int
    warps: int
    stages: int
    copied: int  # 1: weights, and rows that lie in order, come by the copy engine (TMA)
    ahead: int  # steps of inner_block whose weights are asked for before the wait; not where they are copied
    tall: int  # 1: columns are on the tall side of the tensor cores' product, rows on the other, which may be as short as 8


def moe_grouped_triton(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    logits: Tensor,
    choices: int,
    renormalise: bool,
    first: GroupedConfig,
    second: GroupedConfig,
    by_token: bool = False,
) -> Tensor:
    """`kernels.moe.moe` of at least one token; the rest as of `expert_results_triton`."""
    results, masses = expert_results_triton(x, gate_up, down, logits, choices, renormalise, first, second, by_token)
    return weighted_sum_triton(results, masses, renormalise)


def expert_results_triton(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    logits: Tensor,
    choices: int,
    renormalise: bool,
    first: GroupedConfig,
    second: GroupedConfig,
    by_token: bool = False,
) -> tuple[Tensor, Tensor]:
    """What each expert made of its tokens, `[A, D]` in the order of the assignments, and masses `[T, C]` as of `assign_triton`.

    first: for gate and up; second: for down; by_token: a token's results do not depend on the others, bit by bit.
    """
    masses, order, counts = assign_triton(logits, choices, renormalise, by_token or len(x) > MOST_RANKED_TOKENS)
    activated = grouped_product_triton(x, gate_up, order, counts, choices, True, first)
    return grouped_product_triton(activated, down, order, counts, choices, False, second), masses


def grouped_product_triton(
    x: Tensor, weight: Tensor, order: Tensor, counts: Tensor, choices: int, gated: bool, tuned: GroupedConfig
) -> Tensor:
    """gated: x `[T, D]`, weight `[E, 2 * I, D]` -> `silu(gate) * up`, `[A, I]`, an expert's rows behind those of the experts before it.
    Else x is that, weight `[E, D, I]` -> `[A, D]` in the order of the assignments. order and counts: as of `assign_triton`."""
    num_experts, planes_columns, size = weight.shape
    tokens = order.shape[1]
    columns, assignments = planes_columns // (2 if gated else 1), tokens * choices
    rows, column_block, inner_block, warps, stages, copied, ahead, tall = tuned
    addressable = size * x.element_size() % 16 == 0  # by the copy engine
    y = x.new_empty(assignments, columns)
    tiles = min(assignments, assignments // rows + num_experts)
    copied, ahead = (copied, ahead) if addressable else (0, 0)
    even = columns % column_block == 0 and size % inner_block == 0
    weights = TensorDescriptor.from_tensor(weight.view(-1, size), [column_block, inner_block]) if copied else weight
    source = TensorDescriptor.from_tensor(x, [rows, inner_block]) if copied and not gated else x
    _grouped_kernel[(tiles * cdiv(columns, column_block),)](
        source, weights, y, order, counts, tokens, num_experts, columns, size, choices, gated, bool(copied), even,
        next_power_of_2(num_experts), rows, column_block, inner_block, stages, ahead, bool(tall),
        num_warps=warps, **pdl_options(x.device),
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["tokens"])
def _grouped_kernel(
    x, weight, y_ptr, order_ptr, counts_ptr, tokens, num_experts, columns, size, choices, GATED: tl.constexpr,
    COPIED: tl.constexpr, EVEN: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, TALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """COPIED: weight, and x if not GATED, are descriptors. EVEN: tiles are full of columns and steps, so that weights need no mask."""
    column_tiles = tl.cdiv(columns, COLUMNS)
    tile, first_column = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles * COLUMNS
    PLANES: tl.constexpr = 2 if GATED else 1
    if PDL and GATED:
        if AHEAD and tile < tl.minimum(num_experts, GUESSED_TILES):  # of the expert whose tile this is if all have one each
            _ask_for_weights(weight, tile, first_column, columns, size, PLANES, COLUMNS, INNER, AHEAD)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + index, mask=index < num_experts, other=0)  # for down, older than the kernel before this one
    expert_tiles = (counts + ROWS - 1) // ROWS
    is_before = tl.cumsum(expert_tiles, axis=0) <= tile
    before = is_before.to(tl.int32), tl.where(is_before, counts, 0), tl.where(is_before, expert_tiles, 0)
    expert, begin, tiles_before = tl.reduce(before, 0, _add_each)
    count = tl.load(counts_ptr + expert, mask=expert < num_experts, other=0)
    first_row = (tile - tiles_before) * ROWS
    if PDL and not GATED:
        if AHEAD and count > 0:
            _ask_for_weights(weight, expert, first_column, columns, size, PLANES, COLUMNS, INNER, AHEAD)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count > 0:
        row = first_row + tl.arange(0, ROWS)
        in_rows = row < count
        place = begin + row
        assignment = tl.load(order_ptr + expert.to(tl.int64) * tokens + row, mask=in_rows, other=0)
        column = first_column + tl.arange(0, COLUMNS)
        weight_row = expert * columns * PLANES + first_column
        if not COPIED:
            weight_ptr = weight + (expert.to(tl.int64) * columns * PLANES + column)[:, None] * size
            in_columns = (column < columns)[:, None]
        if GATED or not COPIED:
            source = assignment // choices if GATED else place
            x_row_ptr = x + source.to(tl.int64)[:, None] * size
        HEIGHT: tl.constexpr = COLUMNS if TALL else ROWS
        WIDTH: tl.constexpr = ROWS if TALL else COLUMNS
        total = tl.zeros([HEIGHT, WIDTH], tl.float32)
        total_up = tl.zeros([HEIGHT, WIDTH], tl.float32)
        for start in tl.range(0, size, INNER, num_stages=STAGES):
            inner = start + tl.arange(0, INNER)[None, :]
            if COPIED and not GATED:
                values = x.load([begin + first_row, start])
            else:
                in_x = in_rows[:, None] if EVEN else in_rows[:, None] & (inner < size)
                values = tl.load(x_row_ptr + inner, mask=in_x, other=0.0)  # what no row needs is not read: many tiles are half empty
            if COPIED:
                gate = weight.load([weight_row, start])
            else:
                in_weight = None if EVEN else in_columns & (inner < size)
                gate = tl.load(weight_ptr + inner, mask=in_weight, other=None if EVEN else 0.0)
            total = add_product(total, values, gate, ROWS, TALL)
            if GATED:
                if COPIED:
                    up = weight.load([weight_row + columns, start])
                else:
                    up = tl.load(weight_ptr + columns.to(tl.int64) * size + inner, mask=in_weight, other=None if EVEN else 0.0)
                total_up = add_product(total_up, values, up, ROWS, TALL)
        if GATED:
            total = total * tl.sigmoid(total) * total_up
        if TALL:
            total = total.T
        y_row_ptr = y_ptr + (place if GATED else assignment).to(tl.int64)[:, None] * columns
        tl.store(y_row_ptr + column[None, :], total.to(y_ptr.dtype.element_ty), mask=in_rows[:, None] & (column < columns)[None, :])


@triton.jit
def _add_each(first, second, third, other_first, other_second, other_third):
    return first + other_first, second + other_second, third + other_third


@triton.jit
def _ask_for_weights(
    weight_ptr, expert, first_column, columns, size, PLANES: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, STEPS: tl.constexpr
):
    """Asks for the first steps of a tile's rows to be brought into the L2 cache."""
    column = first_column + tl.arange(0, COLUMNS)
    ELEMENT_BYTES: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
    sizes = tl.where(column < columns, tl.minimum(size, INNER * STEPS), 0) * ELEMENT_BYTES // 16 * 16
    for plane in tl.static_range(PLANES):
        prefetch(weight_ptr + (expert.to(tl.int64) * PLANES * columns + plane * columns + column) * size, sizes)
