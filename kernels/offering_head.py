"""The language model's head that chooses: of a row that asks for no more than a temperature no logit is written. Its noise is added to the
sums as they are made, and each tile of them offers its best. Rows that ask for more have their logits written, for that to change them.

Which it is depends on the row alone, so a row is chosen alike whatever its neighbours ask for. Where it was measured to be faster than
the head's logits and a choice from them, the GPU's table has a configuration.

B rows, N columns, of which the last may be padding, D inner size, T tiles of columns.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.launch import cdiv, next_power_of_2, pdl_options
from kernels.noise import GREEDY_BELOW, noisy_block
from kernels.offers import NAN, UNDECIDED, key_of, keys_of, scores_of
from kernels.skinny_linear import add_product
from kernels.tuning import entries, entry_for, remembered

PART = 32  # sums of a thread that become scores at a time: for more of them there are no registers
NO_COLUMN = tl.constexpr(2**30)


class Config(NamedTuple):
    row_block: int  # 1: one row, without tensor cores
    column_block: int
    inner_block: int
    warps: int
    stages: int
    tall: int  # 1: columns are on the tall side of the tensor cores' product, rows on the other, which may be as short as 8


# Temperature [B] float32, seeds [B] int64, positions [B] int32, as `kernels.sampling.sample` takes them.
Noise = tuple[Tensor, Tensor, Tensor]


class Scores(NamedTuple):
    """What rows are chosen by. At least one is there; where a row is decided by offers, its logits may be anything."""

    logits: Tensor | None  # [B, N] float32, -inf in padding; None: no row asks for them
    offers: Tensor | None = None  # [B, T] int64, see `kernels.offers`: of a row that is to be chosen from its logits all are UNDECIDED

    @property
    def wanted_logits(self) -> Tensor:
        """Of a step that asks for them."""
        assert self.logits is not None, "no row asked for its logits"
        return self.logits

    @property
    def wanted_offers(self) -> Tensor:
        """Of a step whose head makes them."""
        assert self.offers is not None, "the head made no offers"
        return self.offers


def measured(device: torch.device, dtype: torch.dtype, columns: int, size: int) -> Mapping[str, list[int]]:
    """A shape's entries."""
    return entries(device, dtype, "offering_head", f"{columns}x{size}")


@remembered
def config(device: torch.device, dtype: torch.dtype, rows: int, columns: int, size: int) -> Config | None:
    """None: the logits are to be computed, and chosen from."""
    found = entry_for(measured(device, dtype, columns, size), rows) if rows else None
    return Config(*found) if found else None


def offering_head(
    x: Tensor, weight: Tensor, real: int, first: int, noise: Noise | None, asks: Tensor | None, every: bool
) -> Scores | None:  # fmt: skip
    """x `[B, D]`, weight `[N, D]`, its rows the ids from `first` on, of which the first `real` are none of padding; noise: None if rows are
    greedy; asks `[B]` int32, not 0 for rows that ask for more than a temperature; None: no row does. every: write the logits of all rows,
    whatever they ask for. On a GPU only.

    None, and nothing is computed, where the table has no configuration. Raises ValueError if the rows of x or weight are not contiguous.
    """
    tuned = config(x.device, x.dtype, len(x), *weight.shape)
    return None if tuned is None else offering_head_triton(x, weight, real, first, noise, asks, every, tuned)


def offering_head_torch(
    x: Tensor, weight: Tensor, real: int, first: int, noise: Noise | None, asks: Tensor | None, every: bool
) -> Scores:  # fmt: skip
    logits = x.float() @ weight.float().T
    logits[:, real:] = -torch.inf
    ids = torch.arange(first, first + len(weight), device=x.device)
    scores = logits if noise is None else scores_of(logits, ids, *noise)
    offers = keys_of(scores, ids).masked_fill_(scores.isnan(), NAN.value).amax(dim=1, keepdim=True)
    if asks is not None:
        offers[asks != 0] = UNDECIDED.value
    return Scores(logits if every or asks is not None else None, offers)


def offering_head_triton(
    x: Tensor, weight: Tensor, real: int, first: int, noise: Noise | None, asks: Tensor | None, every: bool, tuned: Config
) -> Scores:
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"x must have contiguous rows and weight be contiguous, got strides {x.stride()} and {weight.stride()}")
    (rows, size), columns = x.shape, len(weight)
    row_tiles, column_tiles = cdiv(rows, tuned.row_block), cdiv(columns, tuned.column_block)
    offers = torch.empty(rows, column_tiles, dtype=torch.int64, device=x.device)
    written = every or asks is not None
    logits = torch.empty(rows, columns, dtype=torch.float32, device=x.device) if written else None
    sums = tuned.row_block * tuned.column_block // (32 * tuned.warps)
    parts = 1 if tuned.tall else max(next_power_of_2(sums) // PART, 1)
    _offering_head_kernel[(row_tiles * column_tiles,)](
        TensorDescriptor.from_tensor(x, [tuned.row_block, tuned.inner_block]),
        TensorDescriptor.from_tensor(weight, [tuned.column_block, tuned.inner_block]),
        offers, logits, *(noise or (None, None, None)), asks, rows, row_tiles, column_tiles, columns, real, first, size,
        noise is not None, asks is not None, written, every, tuned.row_block, tuned.column_block, tuned.inner_block,
        tuned.stages, tuned.tall == 1, parts, num_warps=tuned.warps, **pdl_options(x.device),
    )  # fmt: skip
    return Scores(logits, offers)


@triton.jit(do_not_specialize=["rows", "row_tiles", "column_tiles", "real", "first"])
def _offering_head_kernel(
    x, weight, offers_ptr, logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, asks_ptr, rows, row_tiles, column_tiles,
    columns, real, first, size, RANDOM: tl.constexpr, ASKING: tl.constexpr, WRITTEN: tl.constexpr, EVERY: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr, TALL: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x and weight are descriptors. Programs are numbered through the tiles of rows first: those share their columns' weights in the cache.

    PARTS: of a tile's columns, whose scores are made one after the other.
    """
    row_tile, column_tile = tl.program_id(0) % row_tiles, tl.program_id(0) // row_tiles
    row = row_tile * ROWS + tl.arange(0, ROWS)
    in_rows = row < rows
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    asks = in_rows
    if ASKING:
        asks = tl.load(asks_ptr + row, mask=in_rows, other=1) != 0
    if RANDOM:  # ahead of the loop, like what is asked for: no tile waits for them at its end
        temperature = tl.load(temperature_ptr + row, mask=in_rows, other=0.0)
        seed = tl.load(seeds_ptr + row, mask=in_rows, other=0)
        position = tl.load(positions_ptr + row, mask=in_rows, other=0)
    HEIGHT: tl.constexpr = COLUMNS if ROWS == 1 or TALL else ROWS
    WIDTH: tl.constexpr = INNER if ROWS == 1 else (ROWS if TALL else COLUMNS)
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for start in tl.range(0, size, INNER, num_stages=STAGES):
        values = x.load([row_tile * ROWS, start])
        weights = weight.load([column_tile * COLUMNS, start])
        total = add_product(total, values, weights, ROWS, TALL)
    if ROWS == 1:
        total = tl.sum(total, axis=1)[None, :]
    elif TALL:
        total = tl.trans(total)
    parts = _parts(total, PARTS)
    part_column = column_tile * COLUMNS + tl.arange(0, COLUMNS // PARTS)
    if WRITTEN:
        written = in_rows & (EVERY | asks)
        row_ptr = logits_ptr + row.to(tl.int64)[:, None] * columns
        for part in tl.static_range(PARTS):
            column = (part_column + part * (COLUMNS // PARTS))[None, :]
            logits = tl.where(column < real, parts[part], float("-inf"))
            tl.store(row_ptr + column, logits, mask=written[:, None] & (column < columns))
    offer = tl.full([ROWS], UNDECIDED, tl.int64)
    if not ASKING or tl.min(asks.to(tl.int32), axis=0) == 0:
        if RANDOM:
            random = (temperature >= GREEDY_BELOW)[:, None]
            divisor = tl.where(random, temperature[:, None], 1.0)
        best, winner = tl.full([ROWS], float("-inf"), tl.float32), tl.full([ROWS], 0, tl.int32)
        for part in tl.static_range(PARTS):
            column = (part_column + part * (COLUMNS // PARTS))[None, :]
            scores = tl.where(column < real, parts[part], float("-inf"))
            if RANDOM:
                noisy = noisy_block(scores, divisor, seed[:, None], position[:, None], first + column)
                scores = tl.where(random, noisy, scores)
            part_best = tl.reduce(scores, 1, _larger_or_nan)
            part_winner = tl.min(tl.where(scores == part_best[:, None], column, NO_COLUMN), axis=1)
            winner = tl.where((part_best > best) | (part == 0), part_winner, winner)
            best = _larger_or_nan(best, part_best)
        key = tl.where(best != best, NAN, key_of(best, first + winner))
        offer = tl.where(asks, offer, key) if ASKING else key
    tl.store(offers_ptr + row.to(tl.int64) * column_tiles + column_tile, offer, mask=in_rows)


@triton.jit
def _larger_or_nan(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _parts(block, COUNT: tl.constexpr):
    """As many of like width, of the block's columns in their order; a power of two of them."""
    parts = (block,)
    if COUNT > 1:
        left, right = tl.split(tl.permute(tl.reshape(block, [block.shape[0], 2, block.shape[1] // 2]), (0, 2, 1)))
        parts = _parts(left, COUNT // 2) + _parts(right, COUNT // 2)
    return parts
