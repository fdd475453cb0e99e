"""Finds the fastest configuration of the products of few rows, for the shapes of models: `python -m benchmarks tune`.

A pool of processes compiles the candidates; they are timed over replays of a graph whose weights rotate through memory. The
fastest few are tried with weights asked for ahead of the wait, too. A configuration is written to the table of this GPU
(`kernels/tuning_*.json`) where it beats the library by more than noise.
"""

import json
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.kernels import DTYPE, L2_BYTES, Launch, time_launches
from benchmarks.report import Report, Value
from benchmarks.workload import config_file
from kernels.linear import Config, gated_linear_triton, linear_triton
from kernels.silu_and_mul import silu_and_mul
from kernels.tuning import Table, file_name
from services.worker.engine.roofline import Shape
from shared.errors import ConfigError

ROWS = (1, 16, 32, 64)
GAIN = 0.98  # of the library's time, that a configuration must stay below
ROUGH_REPLAYS, FINE_REPLAYS, FINALISTS = 4, 20, 4
FINE_SHARE = 0.35  # of the time, that the first round leaves
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
        if remainder == 0 and steps <= 20 and elements in (64, 128) and MULTIPROCESSORS <= programs <= 16 * MULTIPROCESSORS:
            yield Config(1, columns, inner, splits, warps, 1 if steps == 1 else 3, 0)


def _tile_candidates(each: Product, rows: int) -> Iterator[Config]:
    row_block = max(16, rows)
    for columns, inner, splits, stages in product((8, 16, 32, 64), (128, 256), (1, 2, 3, 4, 6, 8), (3, 5)):
        programs = each.columns // columns * splits
        weight_bytes = DTYPE.itemsize * columns * inner * (2 if each.gated else 1)
        shared_bytes = stages * (weight_bytes + DTYPE.itemsize * row_block * inner)
        steps, remainder = divmod(each.size, inner * splits)
        fits = remainder == 0 and steps >= stages - 1 and shared_bytes <= MAX_SHARED_BYTES
        if fits and 4096 <= weight_bytes <= 65536 and 0.7 * MULTIPROCESSORS <= programs <= 5 * MULTIPROCESSORS:
            yield Config(row_block, columns, inner, splits, 8 if weight_bytes * stages > 98304 else 4, stages, 0)


def reading_ahead(each: Product, tuned: Config) -> list[Config]:
    """The same with weights asked for before the wait: up to a share's, and a quarter of that."""
    steps = each.size // tuned.inner_block // tuned.splits
    most = min(1 << (steps.bit_length() - 1), 16)  # Triton's blocks are powers of two
    return [] if tuned.row_block == 1 and steps == 1 else [tuned._replace(prefetch=ahead) for ahead in {most, max(most // 4, 1)}]


def launches_of(each: Product, x: Tensor, weights: Sequence[Tensor], tuned: Config | None) -> list[Launch]:
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
        """Fastest first. Raises AssertionError for one that computes something else than the library."""
        each, times = self.product, []
        expected = _library(self.x, self.weights[0], each.gated)
        for tuned in configs:
            if _runs(each, self.x, self.weights[0], tuned):
                launches = launches_of(each, self.x, self.weights, tuned)
                torch.testing.assert_close(launches[0](), expected, rtol=3e-2, atol=3e-2, msg=f"{each} {tuned} is wrong")
                times.append(Timed(time_launches(launches, replays).median_us, tuned))
        return sorted(times)


def tune(models: Sequence[str], rows: Sequence[int], seconds: float, out: Path) -> Report:
    """Needs a GPU; what is not reached within the time is left to the library. Raises ConfigError without one."""
    if not torch.cuda.is_available():
        raise ConfigError("products are tuned on a GPU, and none is here")
    deadline = time.monotonic() + seconds
    wanted = [(each, count) for count in rows for each in dict.fromkeys(each for model in models for each in products(model))]
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:

        def compiled(jobs: Iterable[Job]) -> None:
            # A kernel depends on its configuration, hardly on the shape: one job of a kind does.
            kinds = {(job.product.gated, job.tuned, job.tuned.inner_block * job.tuned.splits == job.product.size): job for job in jobs}
            several = list(kinds.values())
            list(pool.map(compile_jobs, [several[first::PROCESSES] for first in range(PROCESSES)]))
            print(f"compiled {len(several)} kernels, {deadline - time.monotonic():.0f} s left", flush=True)

        compiled(Job(each, count, tuned) for each, count in wanted for tuned in candidates(each, count))
        finalists: dict[tuple[Product, int], list[Config]] = {}
        for each, count in wanted:
            if time.monotonic() < deadline - FINE_SHARE * seconds:
                best = Inputs(each, count).timed(candidates(each, count), ROUGH_REPLAYS)[:FINALISTS]
                finalists[each, count] = [variant for _, tuned in best for variant in (tuned, *reading_ahead(each, tuned))]
        compiled(Job(each, count, tuned) for (each, count), found in finalists.items() for tuned in found)

    table: Table = {}
    lines: list[Sequence[Value]] = []
    for (each, count), found in finalists.items():
        if time.monotonic() > deadline:
            break
        inputs = Inputs(each, count)
        ours, library_us = inputs.timed(found, FINE_REPLAYS)[0], inputs.library_us()
        won = ours.us < GAIN * library_us
        shape = f"{each.columns}x{each.size}"
        if won:
            table.setdefault(each.operation, {}).setdefault(shape, {})[str(count)] = list(ours.tuned)
        rate = each.weight_bytes / min(ours.us, library_us) / 1e6
        lines.append((each.operation, shape, count, library_us, ours.us, "ours" if won else "library", rate, str([*ours.tuned])))
        print(f"{each.operation} {shape} M={count}: library {library_us:.2f}, ours {ours.us:.2f} us, {[*ours.tuned]}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    path = out / file_name(torch.cuda.get_device_name())
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    return Report(
        name="tune",
        columns=("operation", "shape", "rows", "library us", "ours us", "winner", "TB/s", "configuration"),
        rows=lines,
        notes=(f"the table is in {path}: copy it to kernels/",),
    )
