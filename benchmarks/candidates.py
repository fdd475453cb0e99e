"""The products of few rows of a decode step, and the configurations of each that could be fast."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from benchmarks.launches import DTYPE
from benchmarks.workload import config_file
from kernels.linear import Config
from services.worker.engine.roofline import Shape
from shared.errors import ConfigError

MAX_SHARED_BYTES = 220 * 1024
MULTIPROCESSORS = 132  # about: what a grid should fill, once to some times


@dataclass(frozen=True)
class Product:
    """columns: of the result; a gated product's weight has twice as many rows."""

    gated: bool
    columns: int
    size: int

    @property
    def operation(self) -> str:
        return "gated_linear" if self.gated else "linear"

    @property
    def shape(self) -> str:
        return f"{self.columns}x{self.size}"

    @property
    def weight_rows(self) -> int:
        return self.columns * (2 if self.gated else 1)

    @property
    def weight_bytes(self) -> int:
        return DTYPE.itemsize * self.weight_rows * self.size

    @property
    def is_small(self) -> bool:
        """As a router of experts: not enough for every multiprocessor to read much."""
        return self.weight_bytes < 2**20


class Join(NamedTuple):
    """A product whose columns are added to the residual, and the one that reads the norm of that."""

    writer: Product
    reader: Product


def products(model: str, ranks: int = 1) -> list[Product]:
    """Of a decode step of one of a model's ranks, by the name of its shape. The head is left out: it reads so much that the library is
    fast. Raises ConfigError for a number of ranks that does not divide the model."""
    shape = _shape(model)
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


def joins(model: str) -> list[Join]:
    """Of a dense model: both halves of a layer. None of a model of experts, whose norm is read by more than one kernel."""
    if _shape(model).experts > 1:
        return []
    qkv, output, gate_up, down = products(model)
    return [Join(output, gate_up), Join(down, qkv)]


def _shape(model: str) -> Shape:
    return Shape.from_config(json.loads(config_file(model).read_text()))


def candidates(each: Product, rows: int) -> list[Config]:
    """What could be fast: grids that fill the GPU once to a few times, tiles with enough loads in flight."""
    vectors = _vector_candidates(each) if rows == 1 else ()
    tiles = _tile_candidates(each, rows) if rows > 1 or each.is_small else ()
    return [*vectors, *tiles, *_tall_candidates(each, rows)]


def _vector_candidates(each: Product) -> Iterator[Config]:
    """For one row: a share's weights are all in registers before the wait, or its steps are long."""
    for columns, inner, splits, warps in product((2, 4, 8, 16, 32), (512, 1024, 2048, 4096), (1, 2, 3, 4, 5), (4, 8)):
        steps, remainder = divmod(each.size, inner * splits)
        elements = columns * inner * (2 if each.gated else 1) // (32 * warps)  # of a thread and step
        programs = each.columns // columns * splits
        if remainder or not 0.9 * _least_programs(each) <= programs <= 16 * MULTIPROCESSORS:
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
    for columns, splits, stages in product((8, 16) if each.is_small else (16, 32, 64), (1, 2, 3, 4, 6, 8), (3, 5)):
        weight_bytes = DTYPE.itemsize * columns * inner * (2 if each.gated else 1)
        if _fills(each, max(16, rows), columns, inner, splits, stages):
            yield Config(max(16, rows), columns, inner, splits, 8 if weight_bytes * stages > 98304 else 4, stages, 0)


def _tall_candidates(each: Product, rows: int) -> Iterator[Config]:
    """64 or 128 columns on the tall side, where a warp group multiplies them from shared memory, and 8 rows are no more than 8."""
    steps = ((64, 6), (128, 3), (128, 5), (256, 3), (512, 3))
    for row_block, columns, splits, (inner, stages) in product((8, 16, 32, 64), (64, 128), (1, 2, 3, 4, 5, 8), steps):
        if row_block in (max(8, rows), max(16, rows)) and _fills(each, row_block, columns, inner, splits, stages):
            yield Config(row_block, columns, inner, splits, 4 if columns == 64 else 8, stages, 0, weights_first=1)


def _fills(each: Product, row_block: int, columns: int, inner: int, splits: int, stages: int) -> bool:
    """Whether such tiles fit, with whole steps and full columns, and whether there are enough of them and not too many."""
    programs = each.columns // columns * splits
    shared_bytes = stages * DTYPE.itemsize * inner * (columns * (2 if each.gated else 1) + row_block)
    steps, remainder = divmod(each.size, inner * splits)
    fits = remainder == 0 and each.columns % columns == 0 and steps >= stages - 1 and shared_bytes <= MAX_SHARED_BYTES
    return fits and 0.6 * _least_programs(each) <= programs <= 5 * MULTIPROCESSORS


def _least_programs(each: Product) -> int:
    return MULTIPROCESSORS // 2 if each.is_small else MULTIPROCESSORS


def reading_ahead(each: Product, tuned: Config) -> list[Config]:
    """The same with weights asked for before the wait: up to a share's, and a quarter of that."""
    steps = each.size // tuned.inner_block // tuned.splits
    most = min(1 << (steps.bit_length() - 1), 16)  # Triton's blocks are powers of two
    return [] if tuned.row_block == 1 and tuned.stages == 1 else [tuned._replace(prefetch=ahead) for ahead in {most, max(most // 4, 1)}]
