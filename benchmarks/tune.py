"""Finds the fastest configuration of the products of few rows, for the shapes of models: `python -m benchmarks tune`.

A pool of processes compiles the candidates; they are timed over replays of a graph whose weights rotate through memory. The
fastest few are tried with weights asked for ahead of the wait, too. A configuration is written to the table of this GPU
(`kernels/tuning_*.json`) where it beats the library by more than noise.
"""

import copy
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.kernels import DTYPE, L2_BYTES, time_launches
from benchmarks.report import Report, Value
from benchmarks.workload import config_file
from kernels.linear import Config, gated_linear_triton, linear_triton
from kernels.silu_and_mul import silu_and_mul
from kernels.tuning import Table, file_name, table
from services.worker.engine.roofline import Shape
from shared.errors import ConfigError

ROWS = (1, 16, 32, 64)
GAIN = 0.98  # of the library's time, that a configuration must stay below
ROUGH_REPLAYS, FINE_REPLAYS, FINALISTS = 4, 20, 4
PROCESSES = 14
MAX_SHARED_BYTES = 220 * 1024
MULTIPROCESSORS = 132  # about: what a grid should fill, once to some times
MAX_WEIGHT_BYTES = 2**30  # of the rotating copies


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
    def weight_bytes(self) -> int:
        return DTYPE.itemsize * self.columns * self.size * (2 if self.gated else 1)

    @property
    def is_small(self) -> bool:
        """As a router of experts: not enough for every multiprocessor to read much."""
        return self.weight_bytes < 2**20


def products(model: str) -> list[Product]:
    """Of a decode step of a model, by the name of its shape. The head is left out: it reads so much that the library is fast."""
    shape = Shape.from_config(json.loads(config_file(model).read_text()))
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found = [Product(False, q + 2 * kv, shape.hidden_size), Product(False, shape.hidden_size, q)]
    if shape.experts == 1:
        found += [Product(True, shape.intermediate_size, shape.hidden_size), Product(False, shape.hidden_size, shape.intermediate_size)]
    else:
        found.append(Product(False, shape.experts, shape.hidden_size))
    return found


def candidates(each: Product, rows: int) -> list[Config]:
    """What could be fast: grids that fill the GPU once to a few times, tiles with enough loads in flight."""
    return [tuned for tuned in (*_vector_candidates(each), *_tile_candidates(each, rows)) if tuned.row_block > 1 or rows == 1]


def _vector_candidates(each: Product) -> Iterator[Config]:
    """For one row: a share is one step, whose weights are in registers before the wait, or a few long steps."""
    for columns, inner, splits, warps in product((2, 4, 8, 16), (512, 1024, 2048, 4096), (1, 2, 3, 4, 5), (4, 8)):
        steps, remainder = divmod(each.size, inner * splits)
        elements = columns * inner * (2 if each.gated else 1) // (32 * warps)  # of a thread, in registers
        programs = each.columns // columns * splits
        full = _least_programs(each) <= programs <= 16 * MULTIPROCESSORS
        if remainder == 0 and steps <= 20 and elements in ((32, 64) if each.is_small else (64, 128)) and full:
            yield Config(1, columns, inner, splits, warps, 1 if steps == 1 else 3, 0)


def _tile_candidates(each: Product, rows: int) -> Iterator[Config]:
    row_block = max(16, rows)
    for columns, inner, splits, stages in product((8, 16, 32, 64), (128, 256), (1, 2, 3, 4, 6, 8), (3, 5)):
        programs = each.columns // columns * splits
        weight_bytes = DTYPE.itemsize * columns * inner * (2 if each.gated else 1)
        shared_bytes = stages * (weight_bytes + DTYPE.itemsize * row_block * inner)
        steps, remainder = divmod(each.size, inner * splits)
        fits = remainder == 0 and steps >= stages - 1 and shared_bytes <= MAX_SHARED_BYTES
        least_bytes = 2048 if each.is_small else 4096
        if fits and least_bytes <= weight_bytes <= 65536 and 0.7 * _least_programs(each) <= programs <= 5 * MULTIPROCESSORS:
            yield Config(row_block, columns, inner, splits, 8 if weight_bytes * stages > 98304 else 4, stages, 0)


def _least_programs(each: Product) -> int:
    return MULTIPROCESSORS // 2 if each.is_small else MULTIPROCESSORS


def reading_ahead(each: Product, tuned: Config) -> list[Config]:
    """The same with weights asked for before the wait: up to a share's, and a quarter of that."""
    steps = each.size // tuned.inner_block // tuned.splits
    most = min(1 << (steps.bit_length() - 1), 16)  # Triton's blocks are powers of two
    return [] if tuned.row_block == 1 and steps == 1 else [tuned._replace(prefetch=ahead) for ahead in {most, max(most // 4, 1)}]


def launches_of(each: Product, x: Tensor, weights: Sequence[Tensor], tuned: Config | None) -> Sequence[Callable[[], Tensor]]:
    """One for each copy of the weights; None: the library's, with the activation after it."""
    if tuned is None:
        return [partial(_library, x, weight, each.gated) for weight in weights]
    if each.gated:
        return [partial(gated_linear_triton, x, weight, None, tuned) for weight in weights]
    return [partial(linear_triton, x, weight, None, tuned) for weight in weights]


def _library(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    y = F.linear(x, weight)
    return silu_and_mul(y) if gated else y


class Job(NamedTuple):
    product: Product
    rows: int
    tuned: Config


def compile_jobs(jobs: Sequence[Job]) -> None:
    """Compiles each, into the cache that all processes share."""
    for each, rows, tuned in jobs:
        x = torch.zeros(rows, each.size, device="cuda", dtype=DTYPE)
        weight = torch.zeros(each.columns * (2 if each.gated else 1), each.size, device="cuda", dtype=DTYPE)
        _runs(each, x, weight, tuned)


def _runs(each: Product, x: Tensor, weight: Tensor, tuned: Config) -> bool:
    try:
        launches_of(each, x, [weight], tuned)[0]()
    except OutOfResources as error:
        print(f"{each} {tuned}: {error}", flush=True)
        return False
    return True


class Timed(NamedTuple):
    us: float
    tuned: Config


class Inputs:
    """Rows, and copies of the weights that no cache holds together."""

    def __init__(self, each: Product, rows: int) -> None:
        self.product, copies = each, max(2, min(-(-2 * L2_BYTES // each.weight_bytes), MAX_WEIGHT_BYTES // each.weight_bytes))
        shape = (copies, each.columns * (2 if each.gated else 1), each.size)
        self.weights = list(torch.randn(shape, device="cuda", dtype=DTYPE) * each.size**-0.5)
        self.x = torch.randn(rows, each.size, device="cuda", dtype=DTYPE)

    def library_us(self) -> float:
        return time_launches(launches_of(self.product, self.x, self.weights, None), FINE_REPLAYS).median_us

    def timed(self, configs: Iterable[Config], replays: int) -> list[Timed]:
        """Fastest first. One that does not fit, or computes something else than the library, is told of and left out."""
        each, times = self.product, []
        expected = _library(self.x, self.weights[0], each.gated)
        for tuned in configs:
            if not _runs(each, self.x, self.weights[0], tuned):
                continue
            launches = launches_of(each, self.x, self.weights, tuned)
            if torch.allclose(launches[0](), expected, rtol=3e-2, atol=3e-2):
                times.append(Timed(time_launches(launches, replays).median_us, tuned))
            else:
                print(f"WRONG: {each} {len(self.x)} rows {tuned}", flush=True)
        return sorted(times)


class Finals(NamedTuple):
    """What is timed to the end, of one product with so many rows."""

    product: Product
    rows: int
    configs: list[Config]


class Compilers:
    """A pool of processes that compile ahead of the timing, in the order of the jobs, into the cache that all processes share."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool
        self._kinds: set[object] = set()

    def start(self, jobs: Iterable[Job]) -> list[Future[None]]:
        """Of kernels that no job before had: a kernel depends on its configuration, hardly on the shape, so one of a kind is compiled."""
        new: list[Job] = []
        for job in jobs:
            kind = (job.product.gated, job.tuned, job.tuned.inner_block * job.tuned.splits == job.product.size)
            if kind not in self._kinds:
                self._kinds.add(kind)
                new.append(job)
        return [self._pool.submit(compile_jobs, new[first::PROCESSES]) for first in range(min(PROCESSES, len(new)))]


def tune(models: Sequence[str], rows: Sequence[int], limit_s: float, out: Path) -> Report:
    """Needs a GPU; what is not reached within the time stays as it is in the table of this GPU. Raises ConfigError without one.

    The least rows first; after each number of them, what was found is in the table that `out` holds.
    """
    if not torch.cuda.is_available():
        raise ConfigError("products are tuned on a GPU, and none is here")
    deadline = time.monotonic() + limit_s
    shapes = list(dict.fromkeys(each for model in models for each in products(model)))
    tuned_table, path = copy.deepcopy(table(torch.device("cuda", 0))), out / file_name(torch.cuda.get_device_name())
    out.mkdir(parents=True, exist_ok=True)
    lines: list[Sequence[Value]] = []
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        compilers = Compilers(pool)

        def started(count: int) -> list[Future[None]]:
            return compilers.start(Job(each, count, tuned) for each in shapes for tuned in candidates(each, count))

        waiting = started(rows[0])
        for number, count in enumerate(rows):
            wait(waiting, timeout=max(deadline - time.monotonic(), 0.0))
            print(f"M={count}: candidates are compiled, {deadline - time.monotonic():.0f} s left", flush=True)
            finals: list[Finals] = []
            for each in shapes:
                if time.monotonic() > deadline:
                    break
                best = Inputs(each, count).timed(candidates(each, count), ROUGH_REPLAYS)[:FINALISTS]
                finals.append(Finals(each, count, [config for _, tuned in best for config in (tuned, *reading_ahead(each, tuned))]))
            ahead = compilers.start(Job(each, count, tuned) for each, count, configs in finals for tuned in configs)
            waiting = started(rows[number + 1]) if number + 1 < len(rows) else []
            wait(ahead, timeout=max(deadline - time.monotonic(), 0.0))
            print(f"M={count}: finalists are compiled, {deadline - time.monotonic():.0f} s left", flush=True)
            for final in finals:
                if time.monotonic() > deadline:
                    break
                lines.append(_decide(final, tuned_table))
            path.write_text(json.dumps(tuned_table, indent=1, sort_keys=True) + "\n")
        pool.shutdown(cancel_futures=True)
    return Report(
        name="tune",
        columns=("operation", "shape", "rows", "library us", "ours us", "winner", "TB/s", "configuration"),
        rows=lines,
        notes=(f"the table is in {path}: copy it to kernels/",),
    )


def _decide(final: Finals, tuned_table: Table) -> Sequence[Value]:
    """Times the finalists and the library, and writes the winner into the table; a line of the report."""
    each, count, configs = final
    inputs = Inputs(each, count)
    times, library_us = inputs.timed(configs, FINE_REPLAYS), inputs.library_us()
    shape = f"{each.columns}x{each.size}"
    entries = tuned_table.setdefault(each.operation, {}).setdefault(shape, {})
    entries.pop(str(count), None)
    if not times:
        return each.operation, shape, count, library_us, None, "library", each.weight_bytes / library_us / 1e6, None
    ours_us, tuned = times[0]
    won = ours_us < GAIN * library_us
    if won:
        entries[str(count)] = list(tuned)
    rate, found = each.weight_bytes / min(ours_us, library_us) / 1e6, str([*tuned])
    print(f"{each.operation} {shape} M={count}: library {library_us:.2f}, ours {ours_us:.2f} us, {found}", flush=True)
    return each.operation, shape, count, library_us, ours_us, "ours" if won else "library", rate, found
