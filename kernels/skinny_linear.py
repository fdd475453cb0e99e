"""Matrix products of the few rows of a decode step, bound by reading the weights. `kernels.linear` chooses between them and the library's.

M rows, N columns (outputs), K inner size. Every program multiplies all rows of a tile with some columns over a share of K. Where the
columns alone do not fill the GPU, K is cut, and the program that finishes last adds up a tile's shares, in their order: no second
launch, and the same bits each time. With PDL a program asks for its weights before it waits for the kernel that computes its rows.

An RMSNorm between two products, with the addition to the residual before it, needs no launch either: the first product's programs add
their columns and multiply them by the norm's weight, and the second divides what it sums by the root mean square of each row, since
`(x / rms(r) * w) @ W = (r * w) @ W / rms(r)`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import MAX_COUNTERS, cdiv, counters, next_power_of_2, pdl_options, prefetch
from kernels.rms_norm import Unscaled

# Asked for before the wait: what memory gives while the kernel before ends and this one begins. Programs that start later need not ask.
AHEAD_BYTES = 8 << 20


class Config(NamedTuple):
    row_block: int  # 1: one row a program, without tensor cores
    column_block: int  # gate and up each
    inner_block: int
    splits: int  # shares of K
    warps: int
    stages: int  # of the loop over a share's steps; 1 for one row: the share's weights are all in registers before the wait
    prefetch: int  # steps of inner_block whose weights are asked for before the wait
    weights_first: int = 0  # 1: columns are the tall side of the tensor cores' product, rows the other
    reads_unscaled: int = 0  # 1: the norm before it is begun by the product before that
    width: int = 0  # columns of a tile that fills its block in part, to give every multiprocessor as much to read; 0: it is full

    @property
    def tile_columns(self) -> int:
        return self.width or self.column_block


def linear_triton(x: Tensor | Unscaled, weight: Tensor, bias: Tensor | None, tuned: Config) -> Tensor:
    return _launch(x, weight, bias, False, tuned)


def gated_linear_triton(x: Tensor | Unscaled, weight: Tensor, bias: Tensor | None, tuned: Config) -> Tensor:
    return _launch(x, weight, bias, True, tuned)


def widened_linear_triton(x: Tensor, weight: Tensor, tuned: Config) -> Tensor:
    return _launch(x, weight, None, False, tuned, dtype=torch.float32)


def linear_add_norm_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float, tuned: Config
) -> Unscaled:
    if not residual.is_contiguous():
        raise ValueError(f"residual must be contiguous, got {tuple(residual.shape)} with strides {residual.stride()}")
    squares = torch.empty(len(x), cdiv(len(weight), tuned.tile_columns), dtype=torch.float32, device=x.device)
    return Unscaled(_launch(x, weight, bias, False, tuned, (residual, norm, squares)), squares, eps)


def _launch(
    x: Tensor | Unscaled,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
    tuned: Config,
    added: tuple[Tensor, Tensor, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """added: residual, norm and squares of `linear_add_norm`. dtype: of the result, if not x's."""
    read_squares, parts, eps = None, 0, 0.0
    if isinstance(x, Unscaled):
        x, read_squares, eps = x
        parts = read_squares.shape[1]
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"x must have contiguous rows and weight be contiguous, got strides {x.stride()} and {weight.stride()}")
    (rows, size), columns = x.shape, weight.shape[0] // (2 if gated else 1)
    y = x.new_empty(rows, columns, dtype=dtype)
    row_tiles, column_tiles = cdiv(rows, tuned.row_block), cdiv(columns, tuned.tile_columns)
    if tuned.splits > 1 and row_tiles * column_tiles > MAX_COUNTERS:
        raise ValueError(f"splits must be 1 for {row_tiles} x {column_tiles} tiles, got {tuned.splits}")
    shares = tuned.splits * rows * columns * (2 if gated else 1) if tuned.splits > 1 else 0
    partial = torch.empty(shares, dtype=torch.float32, device=x.device)
    whole, full = size % tuned.inner_block == 0, tuned.width == 0 and columns % tuned.column_block == 0
    even = full and size % (tuned.inner_block * tuned.splits) == 0
    steps_ahead = tuned.prefetch if size * weight.element_size() % 16 == 0 else 0  # where the copy engine can address the rows
    early = size // (tuned.inner_block * tuned.splits) if even and tuned.row_block == 1 and tuned.stages == 1 else 0
    asked_bytes = max(steps_ahead, 1) * tuned.inner_block * tuned.tile_columns * (2 if gated else 1) * weight.element_size()
    residual, norm, squares = added or (None, None, None)
    _linear_kernel[(column_tiles, tuned.splits, row_tiles)](
        x, weight, bias, y, partial, counters(x.device), residual, norm, squares, read_squares,
        rows, columns, size, x.stride(0), parts, cdiv(AHEAD_BYTES, asked_bytes), tuned.width, eps,
        gated, bias is not None, added is not None, next_power_of_2(parts) if parts else 0, whole, full, tuned.width > 0, early,
        tuned.weights_first == 1, tuned.splits, tuned.row_block, tuned.column_block, tuned.inner_block, tuned.stages, steps_ahead,
        num_warps=tuned.warps, **pdl_options(x.device),
    )  # fmt: skip
    return y


# One kernel for all sizes of batch, or a worker would compile it for each kind of them.
@triton.jit(do_not_specialize=["rows", "asking", "width"])
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, partial_ptr, counters_ptr, residual_ptr, norm_ptr, squares_ptr, read_squares_ptr,
    rows, columns, size, row_stride, parts, asking, width, eps,
    GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr, FULL: tl.constexpr,
    NARROW: tl.constexpr, EARLY: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """asking: programs that ask ahead. ADD: of `linear_add_norm`. PARTS: of the squares of Unscaled rows, padded; 0: they are scaled.

    WHOLE: shares are whole steps, FULL: tiles are full of columns: weights need no mask there. NARROW: tiles have `width` columns.
    EARLY: steps of a share of one row, whose weights are in registers before the wait; 0: none are.
    """
    column_tile, split, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = column_tile * (width if NARROW else COLUMNS) + tl.arange(0, COLUMNS)
    in_columns = column < (tl.minimum((column_tile + 1) * width, columns) if NARROW else columns)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    in_rows = row < rows
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = in_rows[:, None] & in_columns[None, :]
    gate_ptr = weight_ptr + column.to(tl.int64)[:, None] * size
    up_ptr = weight_ptr + (column.to(tl.int64) + columns)[:, None] * size
    steps = tl.cdiv(tl.cdiv(size, INNER), SPLITS)
    begin = split * steps * INNER
    end = tl.minimum(begin + steps * INNER, size)
    if EARLY:
        early_inner = begin + tl.arange(0, INNER)[None, :]
        early_gate, early_up = (), ()
        for step in tl.static_range(EARLY):
            early_gate += (tl.load(gate_ptr + early_inner + step * INNER),)  # type: ignore[assignment]
            if GATED:
                early_up += (tl.load(up_ptr + early_inner + step * INNER),)  # type: ignore[assignment]
    if ADD:
        residual = tl.load(residual_ptr + place, mask=inside, other=0.0)
        norm = tl.load(norm_ptr + column, mask=in_columns, other=0.0)
    if PDL:
        if PREFETCH and not EARLY:  # noqa: SIM102 - the one is known when it compiles, the other when it runs
            if column_tile + split * tl.num_programs(0) < asking:
                _ask_ahead(gate_ptr, begin, end, in_columns, INNER, PREFETCH)
                if GATED:
                    _ask_ahead(up_ptr, begin, end, in_columns, INNER, PREFETCH)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    if PARTS:
        part = tl.arange(0, PARTS)[None, :]
        part_ptr = read_squares_ptr + row[:, None] * parts + part
        in_parts = in_rows[:, None] & (part < parts)
        if SPLITS == 1:  # ahead of the loop, added up after it
            squares = tl.load(part_ptr, mask=in_parts, other=0.0)
    x_row_ptr = x_ptr + row.to(tl.int64)[:, None] * row_stride
    # Without tensor cores every thread keeps sums of its own, added up after the loop.
    HEIGHT: tl.constexpr = COLUMNS if ROWS == 1 or WEIGHTS_FIRST else ROWS
    WIDTH: tl.constexpr = INNER if ROWS == 1 else (ROWS if WEIGHTS_FIRST else COLUMNS)
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    total_up = tl.zeros([HEIGHT, WIDTH], tl.float32)
    if EARLY:
        xs = ()
        for step in tl.static_range(EARLY):  # all ahead of the barriers that bring them to the threads of the weights
            xs += (tl.load(x_row_ptr + early_inner + step * INNER),)  # type: ignore[assignment]
        for step in tl.static_range(EARLY):
            total = add_product(total, xs[step], early_gate[step], ROWS, WEIGHTS_FIRST)
            if GATED:
                total_up = add_product(total_up, xs[step], early_up[step], ROWS, WEIGHTS_FIRST)
    else:
        for start in tl.range(begin, end, INNER, num_stages=STAGES):
            inner = start + tl.arange(0, INNER)[None, :]
            in_steps = in_columns[:, None] if WHOLE else in_columns[:, None] & (inner < end)
            in_weight = None if FULL and WHOLE else in_steps
            x = tl.load(x_row_ptr + inner, mask=in_rows[:, None] & (inner < end), other=0.0)
            gate = tl.load(gate_ptr + inner, mask=in_weight, other=None if FULL and WHOLE else 0.0)
            total = add_product(total, x, gate, ROWS, WEIGHTS_FIRST)
            if GATED:
                up = tl.load(up_ptr + inner, mask=in_weight, other=None if FULL and WHOLE else 0.0)
                total_up = add_product(total_up, x, up, ROWS, WEIGHTS_FIRST)
    if ROWS == 1:
        total = tl.sum(total, axis=1)[None, :]
        total_up = tl.sum(total_up, axis=1)[None, :]
    elif WEIGHTS_FIRST:
        total = tl.trans(total)
        total_up = tl.trans(total_up)

    last = True
    if SPLITS > 1:
        plane = rows * columns  # the shares: [SPLITS, gate and up, M, N]
        PLANES: tl.constexpr = 2 if GATED else 1
        share_ptr = partial_ptr + split * PLANES * plane + place
        tl.store(share_ptr, total, mask=inside)
        if GATED:
            tl.store(share_ptr + plane, total_up, mask=inside)
        tl.debug_barrier()  # all threads' stores before the one thread's release
        counter_ptr = counters_ptr + row_tile * tl.num_programs(0) + column_tile
        last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            tl.store(counter_ptr, 0)
            if PARTS:
                late_squares = tl.load(part_ptr, mask=in_parts, other=0.0)
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            total_up = tl.zeros([ROWS, COLUMNS], tl.float32)
            for share in tl.static_range(SPLITS):
                share_ptr = partial_ptr + share * PLANES * plane + place
                total += tl.load(share_ptr, mask=inside, other=0.0, cache_modifier=".cg")
                if GATED:
                    total_up += tl.load(share_ptr + plane, mask=inside, other=0.0, cache_modifier=".cg")
        if PARTS:
            scale = tl.rsqrt(tl.sum(late_squares if SPLITS > 1 else squares, axis=1) / size + eps)[:, None]
            total *= scale
            total_up *= scale
        total = activated(total, total_up, bias_ptr, column, columns, GATED, BIAS)
        if ADD:
            added = (total.to(y_ptr.dtype.element_ty).to(tl.float32) + residual.to(tl.float32)).to(residual_ptr.dtype.element_ty)
            tl.store(residual_ptr + place, added, mask=inside)
            values = tl.where(inside, added.to(tl.float32), 0.0)
            tl.store(squares_ptr + row * tl.num_programs(0) + column_tile, tl.sum(values * values, axis=1), mask=in_rows)
            total = values * norm.to(tl.float32)[None, :]
        tl.store(y_ptr + place, total, mask=inside)


@triton.jit
def activated(total, total_up, bias_ptr, column, columns, GATED: tl.constexpr, BIAS: tl.constexpr):
    """The sums with their biases; GATED: the SiLU of the first with its, times the second."""
    in_columns = column < columns
    if BIAS:
        total += tl.load(bias_ptr + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        if GATED:
            total_up += tl.load(bias_ptr + columns + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = total * tl.sigmoid(total) * total_up
    return total


@triton.jit
def add_product(total, x, weight, ROWS: tl.constexpr, WEIGHTS_FIRST: tl.constexpr):
    """total + x @ weight.T of tiles, transposed where WEIGHTS_FIRST; of one row the products alone, `[columns, inner]`, to be summed."""
    if ROWS == 1:
        total += x.to(tl.float32) * weight.to(tl.float32)
    elif WEIGHTS_FIRST:
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    else:
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    return total


@triton.jit
def _ask_ahead(row_ptr, begin, end, in_columns, INNER: tl.constexpr, STEPS: tl.constexpr):
    """Asks for the first steps of each of these rows to be brought into the L2 cache."""
    start = begin + tl.arange(0, STEPS)[None, :] * INNER
    ELEMENT_BYTES: tl.constexpr = row_ptr.dtype.element_ty.primitive_bitwidth // 8
    elements = tl.where(in_columns[:, None], tl.minimum(tl.maximum(end - start, 0), INNER), 0)
    prefetch(row_ptr + start, elements * ELEMENT_BYTES // 16 * 16)
