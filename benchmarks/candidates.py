"""The products of few rows of a decode step, and the configurations of each that could be fast."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from benchmarks.launches import DTYPE
from benchmarks.workload import config_file
from kernels.launch import cdiv
from kernels.library import is_lt_faster
from kernels.linear import MAX_ROWS, config
from kernels.skinny_linear import Config
from services.worker.engine.roofline import Shape
from shared.errors import ConfigError

MAX_SHARED_BYTES = 220 * 1024
MULTIPROCESSORS = 132  # about: what a grid should fill, once to some times
MULTIPROCESSOR_BYTES = 227 * 1024  # of shared memory
SPLITS = (1, 2, 3, 4, 5, 6, 8)
MOST_RESIDENT = 4  # programs of a multiprocessor, for which tiles are narrowed


@dataclass(frozen=True)
class Product:
    """columns: of the result; a gated product's weight has twice as many rows."""

    gated: bool
    columns: int
    size: int
    is_head: bool = False  # whose result is float32

    @property
    def operation(self) -> str:
        return "gated_linear" if self.gated else "linear"

    @property
    def shape(self) -> str:
        return f"{self.columns}x{self.size}"

    @property
    def library_shape(self) -> str:
        """Of the product that the library computes: the gate's and the up projection's are one."""
        return f"{self.weight_rows}x{self.size}"

    @property
    def weight_rows(self) -> int:
        return self.columns * (2 if self.gated else 1)

    @property
    def weight_bytes(self) -> int:
        return DTYPE.itemsize * self.weight_rows * self.size

    def config(self, rows: int) -> Config | None:
        """By the tables as they are; None: the library's."""
        return config(self.operation, torch.device("cuda", 0), DTYPE, rows, self.columns, self.size)

    def is_lt_faster(self, rows: int) -> bool:
        return is_lt_faster(torch.device("cuda", 0), DTYPE, rows, self.weight_rows, self.size)

    @property
    def is_small(self) -> bool:
        """As a router of experts: not enough for every multiprocessor to read much."""
        return self.weight_bytes < 2**20


class Join(NamedTuple):
    """A product whose columns are added to the residual, and the one that reads the norm of that."""

    writer: Product
    reader: Product


def products(model: str, ranks: int = 1) -> list[Product]:
    """Of a layer of one of a model's ranks in a decode step, by the name of its shape. Raises ConfigError for a number of ranks that does
    not divide the model."""
    shape = shape_of(model)
    if shape.heads % ranks or shape.intermediate_size % ranks or max(shape.kv_heads, ranks) % min(shape.kv_heads, ranks):
        raise ConfigError(f"tensor-parallel-size: {ranks} ranks do not divide {model}")
    q, kv = shape.heads // ranks * shape.head_dim, max(shape.kv_heads // ranks, 1) * shape.head_dim
    found = [Product(False, q + 2 * kv, shape.hidden_size), Product(False, shape.hidden_size, q)]
    if shape.experts == 1:
        intermediate = shape.intermediate_size // ranks
        found += [Product(True, intermediate, shape.hidden_size), Product(False, shape.hidden_size, intermediate)]
    else:
        found.append(Product(False, shape.experts, shape.hidden_size))
    return found


def head(model: str, ranks: int = 1) -> Product:
    """Of one of a model's ranks: the vocabulary's."""
    shape = shape_of(model)
    return Product(False, cdiv(shape.vocab_size, ranks), shape.hidden_size, is_head=True)


def joins(model: str) -> list[Join]:
    """Of a dense model: both halves of a layer. None of a model of experts, whose norm is read by more than one kernel."""
    if shape_of(model).experts > 1:
        return []
    qkv, output, gate_up, down = products(model)
    return [Join(output, gate_up), Join(down, qkv)]


def shape_of(model: str) -> Shape:
    """By the name of its shape."""
    return Shape.from_config(json.loads(config_file(model).read_text()))


def candidates(each: Product, rows: int) -> list[Config]:
    """What could be fast: grids that fill the GPU once to a few times, tiles with enough loads in flight. None for more than MAX_ROWS."""
    if rows > MAX_ROWS:
        return []
    vectors = _vector_candidates(each) if rows == 1 else ()
    tiles = _tile_candidates(each, rows) if rows > 1 or each.is_small else ()
    return [*vectors, *tiles, *_tall_candidates(each, rows)]


def _vector_candidates(each: Product) -> Iterator[Config]:
    """For one row: a share's weights are all in registers before the wait, or its steps are long."""
    for columns, inner, splits, warps in product((2, 4, 8, 16, 32), (512, 1024, 2048, 4096), (1, 2, 3, 4, 5), (4, 8)):
        steps, remainder = divmod(each.size, inner * splits)
        elements = columns * inner * (2 if each.gated else 1) // (32 * warps)  # of a thread and step
        programs = each.columns // columns * splits
        most = programs if each.is_head and splits == 1 else 16 * MULTIPROCESSORS
        if remainder or not 0.9 * _least_programs(each) <= programs <= most:
            continue
        # Where a step has 8 elements of x for each thread; with fewer, the weights would pass through shared memory to meet them.
        if inner >= 8 * 32 * warps and 32 <= elements * steps <= (64 if each.is_small else 128):
            yield Config(1, columns, inner, splits, warps, 1, 0)
        for stages in (3, 5):
            shared_bytes = stages * DTYPE.itemsize * inner * (columns * (2 if each.gated else 1) + 1)
            if stages - 1 <= steps <= 40 and elements in (64, 128) and shared_bytes <= MAX_SHARED_BYTES:
                yield Config(1, columns, inner, splits, warps, stages, 0)


def _tile_candidates(each: Product, rows: int) -> Iterator[Config]:
    """Rows on the tall side of the tensor cores' product."""
    inner = 128
    for columns, splits, stages in product((8, 16) if each.is_small else (16, 32, 64), SPLITS, (3, 5)):
        weight_bytes = DTYPE.itemsize * columns * inner * (2 if each.gated else 1)
        yield from _filling(each, Config(max(16, rows), columns, inner, splits, 8 if weight_bytes * stages > 98304 else 4, stages, 0))


def _tall_candidates(each: Product, rows: int) -> Iterator[Config]:
    """64 or 128 columns on the tall side, where a warp group multiplies them from shared memory, and 8 rows are no more than 8."""
    steps = ((64, 3), (64, 4), (64, 6), (128, 3), (128, 5), (256, 3), (512, 3))
    for row_block, columns, splits, (inner, stages) in product((8, 16, 32, 64, 128), (64, 128), SPLITS, steps):
        many = row_block == 128  # for which a warp group's registers are too few, and two groups' with twice the columns to add up
        if row_block in (max(8, rows), max(16, rows)) and not (many and columns == 128 and splits > 1):
            yield from _filling(
                each, Config(row_block, columns, inner, splits, 8 if many or columns == 128 else 4, stages, 0, weights_first=1)
            )


def _filling(each: Product, tuned: Config) -> Iterator[Config]:
    """The configuration, and it with narrower tiles: as many as the multiprocessors hold programs at a time, once to some times each.

    Of them those that fit, with whole steps and shares of like sizes, where there are enough programs and not too many.
    """
    buffers = tuned.stages - (tuned.row_block == 8)  # tensor cores that read from registers let go of one
    shared_bytes = buffers * DTYPE.itemsize * tuned.inner_block * (tuned.column_block * (2 if each.gated else 1) + tuned.row_block)
    steps, remainder = divmod(each.size, tuned.inner_block)
    share = cdiv(steps, tuned.splits)
    last = steps - share * (tuned.splits - 1)
    if remainder or last < max(tuned.stages - 1, 0.5 * share) or shared_bytes > MAX_SHARED_BYTES:
        return
    programs = each.columns // tuned.column_block * tuned.splits
    fills = 0.6 * _least_programs(each) <= programs and (programs <= 5 * MULTIPROCESSORS or (each.is_head and tuned.splits == 1))
    if each.columns % tuned.column_block == 0 and fills:
        yield tuned
    if each.is_small:
        return
    for resident in range(1, min(MOST_RESIDENT, MULTIPROCESSOR_BYTES // shared_bytes) + 1):
        width = cdiv(each.columns, resident * MULTIPROCESSORS // tuned.splits)
        if tuned.column_block // 2 < width < tuned.column_block:
            yield tuned._replace(width=width)


def _least_programs(each: Product) -> int:
    return MULTIPROCESSORS // 2 if each.is_small else MULTIPROCESSORS


def reading_ahead(each: Product, tuned: Config) -> list[Config]:
    """The same with weights asked for before the wait: up to a share's, and a quarter of that."""
    steps = each.size // tuned.inner_block // tuned.splits
    most = min(1 << (steps.bit_length() - 1), 16)  # Triton's blocks are powers of two
    return [] if tuned.row_block == 1 and tuned.stages == 1 else [tuned._replace(prefetch=ahead) for ahead in {most, max(most // 4, 1)}]
