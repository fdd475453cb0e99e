"""Finds the fastest configuration of the products of few rows, for the shapes of models: `python -m benchmarks tune`.

A pool of processes compiles the candidates; they are timed over replays of a graph whose weights rotate through memory, each behind
the norm of its rows: as in a layer, the memory is idle for a moment before a product, which asking for weights ahead of the wait
makes use of. That is tried with the fastest few. A configuration is written to the table of this GPU (`kernels/tuning_*.json`) where it
beats the library by more than noise. Then the two products around a norm are timed with its kernel between them, and without.
"""

import copy
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.candidates import Join, Product, candidates, joins, products, reading_ahead
from benchmarks.launches import DTYPE, L2_BYTES, time_launches
from benchmarks.report import Report, Value
from kernels.linear import (
    Config,
    Unscaled,
    config_of,
    gated_linear_torch,
    gated_linear_triton,
    linear_add_norm_triton,
    linear_torch,
    linear_triton,
)
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.silu_and_mul import silu_and_mul
from kernels.tuning import Table, file_name, table
from shared.errors import ConfigError

ROWS = (1, 8, 16, 32, 64)
GAIN = 0.98  # of the library's time, that a configuration must stay below
ROUGH_REPLAYS, FINE_REPLAYS, FINALISTS = 4, 20, 4
PROCESSES = 14
MAX_WEIGHT_BYTES = 2**30  # of the rotating copies
TOLERANCE = 3e-2
EPS = 1e-6


def launches_of(each: Product, x: Tensor, weights: Sequence[Tensor], tuned: Config | None) -> Sequence[Callable[[], Tensor]]:
    """One for each copy of the weights; None: the library's, with the activation after it."""
    if tuned is None:
        return [partial(_library, x, weight, each.gated) for weight in weights]
    return [partial(_ours, each, x, weight, tuned) for weight in weights]


def _ours(each: Product, x: Tensor | Unscaled, weight: Tensor, tuned: Config) -> Tensor:
    return gated_linear_triton(x, weight, None, tuned) if each.gated else linear_triton(x, weight, None, tuned)


def _library(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    y = F.linear(x, weight)
    return silu_and_mul(y) if gated else y


def _behind_norm(launch: Callable[[], Tensor], norm: Callable[[], Tensor]) -> None:
    norm()
    launch()


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
        _ours(each, x, weight, tuned)
    except OutOfResources as error:
        print(f"{each} {tuned}: {error}", flush=True)
        return False
    return True


class Timed(NamedTuple):
    us: float
    tuned: Config


class Inputs:
    """Rows, and copies of the weights that no cache holds together."""

    def __init__(self, each: Product, rows: int, copies: int | None = None) -> None:
        copies = copies or max(2, min(-(-2 * L2_BYTES // each.weight_bytes), MAX_WEIGHT_BYTES // each.weight_bytes))
        self.product = each
        shape = (copies, each.columns * (2 if each.gated else 1), each.size)
        self.weights = list(torch.randn(shape, device="cuda", dtype=DTYPE) * each.size**-0.5)
        self.x = torch.randn(rows, each.size, device="cuda", dtype=DTYPE)
        self.norm = partial(rms_norm, self.x, torch.ones(each.size, device="cuda", dtype=DTYPE), EPS)

    def us(self, tuned: Config | None, replays: int) -> float:
        """Of the product behind the norm of its rows; None: of the library's."""
        launches = launches_of(self.product, self.x, self.weights, tuned)
        return time_launches([partial(_behind_norm, launch, self.norm) for launch in launches], replays).median_us

    def timed(self, configs: Iterable[Config], replays: int) -> list[Timed]:
        """Fastest first. One that does not fit, or computes something else than the library, is told of and left out."""
        each, times = self.product, []
        expected = _library(self.x, self.weights[0], each.gated)
        for tuned in configs:
            if not _runs(each, self.x, self.weights[0], tuned):
                continue
            if torch.allclose(_ours(each, self.x, self.weights[0], tuned), expected, rtol=TOLERANCE, atol=TOLERANCE):
                times.append(Timed(self.us(tuned, replays), tuned))
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


def tune(models: Sequence[str], rows: Sequence[int], ranks: Sequence[int], limit_s: float, out: Path) -> Report:
    """Needs a GPU; what is not reached within the time stays as it is in the table of this GPU. Raises ConfigError without one.

    ranks: the sizes of groups whose ranks' shapes are tuned; between ranks there is a sum before the norm, which no product can make then.

    The least rows first; after each number of them, what was found is in the table that `out` holds.
    """
    if not torch.cuda.is_available():
        raise ConfigError("products are tuned on a GPU, and none is here")
    deadline = time.monotonic() + limit_s
    shapes = list(dict.fromkeys(each for size in ranks for model in models for each in products(model, size)))
    tuned_table, path = copy.deepcopy(table(torch.device("cuda", 0))), out / file_name(torch.cuda.get_device_name())
    out.mkdir(parents=True, exist_ok=True)
    norms = list(dict.fromkeys(join for model in models for join in joins(model))) if 1 in ranks else []
    around: list[tuple[Around, Future[None]]] = []
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
            decided = {final.product for final in finals}
            new = [each for join in norms if decided.issuperset(join) for each in _around(join, count, tuned_table)]
            around += [(each, pool.submit(compile_around, each)) for each in new]
        wait([compiling for _, compiling in around], timeout=max(deadline - time.monotonic(), 0.0))
        lines += [_decide_norm(each, tuned_table) for each, compiling in around if compiling.done()]
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
    times, library_us, shape = inputs.timed(configs, FINE_REPLAYS), inputs.us(None, FINE_REPLAYS), each.shape
    entries = tuned_table.setdefault(each.operation, {}).setdefault(shape, {})
    entries[str(count)] = []
    if not times:
        return each.operation, shape, count, library_us, None, "library", each.weight_bytes / library_us / 1e6, None
    ours_us, tuned = times[0]
    won = ours_us < GAIN * library_us
    if won:
        entries[str(count)] = list(tuned)
    rate, found = each.weight_bytes / min(ours_us, library_us) / 1e6, str([*tuned])
    print(f"{each.operation} {shape} M={count}: library {library_us:.2f}, ours {ours_us:.2f} us, {found}", flush=True)
    return each.operation, shape, count, library_us, ours_us, "ours" if won else "library", rate, found


class Around(NamedTuple):
    """The two products around a norm of so many rows."""

    join: Join
    rows: int
    writer: Config
    reader: Config

    def separate(self, x: Tensor, first: Tensor, residual: Tensor, norm: Tensor, second: Tensor) -> Tensor:
        y = add_rms_norm(linear_triton(x, first, None, self.writer), residual, norm, EPS)
        return _ours(self.join.reader, y, second, self.reader)

    def fused(self, x: Tensor, first: Tensor, residual: Tensor, norm: Tensor, second: Tensor) -> Tensor:
        return _ours(self.join.reader, linear_add_norm_triton(x, first, None, residual, norm, EPS, self.writer), second, self.reader)


def _around(join: Join, rows: int, tuned_table: Table) -> list[Around]:
    """One, where the table has both products for so many rows."""
    entries = [tuned_table.get(each.operation, {}).get(each.shape, {}) for each in join]
    writer, reader = (config_of(each, rows) for each in entries)
    return [] if writer is None or reader is None or not entries[1].get(str(rows)) else [Around(join, rows, writer, reader)]


def compile_around(around: Around) -> None:
    """Compiles the fused kernels, into the cache that all processes share."""
    inputs = [Inputs(each, around.rows, copies=1) for each in around.join]
    residual, norm = (torch.zeros(count, around.join.writer.columns, device="cuda", dtype=DTYPE) for count in (around.rows, 1))
    around.fused(inputs[0].x, inputs[0].weights[0], residual, norm[0], inputs[1].weights[0])


def _decide_norm(around: Around, tuned_table: Table) -> Sequence[Value]:
    """Times both ways and notes in the reader's entry whether the fused one is faster; a line of the report.

    One whose sums are not those of the separate kernels, bit by bit, is told of and not taken.
    """
    (writer, reader), rows = around.join, around.rows
    inputs = [Inputs(each, rows) for each in around.join]
    x, norm = inputs[0].x, 1 + torch.randn(writer.columns, device="cuda", dtype=DTYPE) / 8
    pairs = list(zip(*(cycle(each.weights) for each in inputs), range(max(len(each.weights) for each in inputs)), strict=False))
    ways, sums = (around.separate, around.fused), [torch.ones(rows, writer.columns, device="cuda", dtype=DTYPE) for _ in range(2)]
    first, second, _ = pairs[0]
    got = [way(x, first, residual, norm, second).float() for way, residual in zip(ways, sums, strict=True)]
    exact = rms_norm(sums[0].float(), norm.float(), EPS)
    expected = (gated_linear_torch if reader.gated else linear_torch)(exact, second.float())
    errors = [float((y - expected).abs().mean() / expected.abs().mean()) for y in got]
    right = torch.equal(*sums) and errors[1] < 1.1 * errors[0]
    if not right:
        print(f"WRONG: {around}, errors {errors}", flush=True)
    times = [
        time_launches(
            [partial(_behind_norm, partial(way, x, a, sums[0], norm, b), inputs[0].norm) for a, b, _ in pairs], FINE_REPLAYS
        ).median_us
        for way in ways
    ]
    won = right and times[1] < times[0]
    tuned_table[reader.operation][reader.shape][str(rows)] = list(around.reader._replace(reads_unscaled=int(won)))
    shapes, found = f"{writer.shape} {reader.shape}", f"errors {errors[0]:.2e} {errors[1]:.2e}"
    print(f"norm {shapes} M={rows}: separate {times[0]:.2f}, fused {times[1]:.2f} us, {found}", flush=True)
    rate = (writer.weight_bytes + reader.weight_bytes) / min(times) / 1e6
    return "norm", shapes, rows, times[0], times[1], "fused" if won else "separate", rate, found
