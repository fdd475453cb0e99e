"""Finds the fastest configuration of the products of few rows, for the shapes of models: `python -m benchmarks tune`.

A pool of processes compiles the candidates; they are timed over replays of a graph whose weights rotate through memory, each behind
the norm of its rows: as in a layer, the memory is idle for a moment before a product, which asking for weights ahead of the wait
makes use of. That is tried with the fastest few. A configuration is written to the table of this GPU (`kernels/tuning_*.json`) where it
beats the library by more than noise. Then the two products around a norm are timed with its kernel between them, and without it. At last
whole layers choose among the fastest.
"""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.candidates import Product, candidates, head, joins, products, reading_ahead
from benchmarks.launches import DTYPE
from benchmarks.products import Inputs, runs
from benchmarks.report import Report, Value
from benchmarks.tune_layers import LayerTuner, choices_of
from benchmarks.tune_norms import Around, around_norm, compile_around, decide_norm
from benchmarks.tuning import PROCESSES, RenewedTable, compilers
from kernels.skinny_linear import Config
from shared.errors import ConfigError

ROWS = (1, 8, 16, 32, 64, 128, 256)  # of 256 layers choose between the library's two
GAIN = 0.98  # of the library's time, that a configuration must stay below
ROUGH_REPLAYS, FINE_REPLAYS, FINALISTS = 4, 20, 4


class Job(NamedTuple):
    product: Product
    rows: int
    tuned: Config


def compile_jobs(jobs: Sequence[Job]) -> None:
    """Compiles each, into the cache that all processes share."""
    for each, rows, tuned in jobs:
        x = torch.zeros(rows, each.size, device="cuda", dtype=DTYPE)
        weight = torch.zeros(each.weight_rows, each.size, device="cuda", dtype=DTYPE)
        runs(each, x, weight, tuned)


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
            each, tuned = job.product, job.tuned._replace(width=min(job.tuned.width, 1))  # how wide is known when it runs
            kind = each.gated, each.is_head, tuned, each.size // (tuned.inner_block * tuned.splits) if tuned.row_block == 1 else 0
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
    shapes = list(dict.fromkeys(each for size in ranks for model in models for each in (*products(model, size), head(model, size))))
    renewed = RenewedTable(out)
    before = {(model, count): choices_of(model, count) for model in models for count in rows}
    norms = list(dict.fromkeys(join for model in models for join in joins(model))) if 1 in ranks else []
    around: list[tuple[Around, Future[None]]] = []
    lines: list[Sequence[Value]] = []
    fastest: dict[tuple[Product, int], list[Config]] = {}
    with compilers() as pool:
        ahead_of_timing = Compilers(pool)

        def started(count: int) -> list[Future[None]]:
            return ahead_of_timing.start(Job(each, count, tuned) for each in shapes for tuned in candidates(each, count))

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
            ahead = ahead_of_timing.start(Job(each, count, tuned) for each, count, configs in finals for tuned in configs)
            waiting = started(rows[number + 1]) if number + 1 < len(rows) else []
            wait(ahead, timeout=max(deadline - time.monotonic(), 0.0))
            print(f"M={count}: finalists are compiled, {deadline - time.monotonic():.0f} s left", flush=True)
            for final in finals:
                if time.monotonic() > deadline:
                    break
                line, fastest[final.product, count] = _decide(final, renewed)
                lines.append(line)
            renewed.write()
            decided = {final.product for final in finals}
            new = [each for join in norms if decided.issuperset(join) for each in around_norm(join, count, renewed.entries)]
            around += [(each, pool.submit(compile_around, each)) for each in new]
        wait([compiling for _, compiling in around], timeout=max(deadline - time.monotonic(), 0.0))
        lines += [decide_norm(each, renewed.entries) for each, compiling in around if compiling.done()]
        renewed.write()
        pool.shutdown(cancel_futures=True)
    for count, model in product(rows, models if 1 in ranks else ()):
        if time.monotonic() > deadline:
            print(f"layer of {model}, M={count}: no time to choose; its new entries are of the products that are fastest alone", flush=True)
            continue
        finalists = {each: fastest[each, count] for each in products(model) if (each, count) in fastest}
        lines += LayerTuner(model, count, renewed).decide(before[model, count], finalists)
        renewed.write()
    return Report(
        name="tune",
        columns=("operation", "shape", "rows", "library us", "ours us", "winner", "TB/s", "configuration"),
        rows=lines,
        notes=(f"the table is in {renewed.path}: copy it to kernels/",),
    )


def _decide(final: Finals, renewed: RenewedTable) -> tuple[Sequence[Value], list[Config]]:
    """Times the finalists and the library, and writes the winner into the table; a line of the report, and the fastest few."""
    each, count, configs = final
    inputs = Inputs(each, count)
    times, library_us, shape = inputs.timed(configs, FINE_REPLAYS), inputs.us(None, FINE_REPLAYS), each.shape
    renewed.put_product(each, count, None)
    if not times:
        return (each.operation, shape, count, library_us, None, "library", each.weight_bytes / library_us / 1e6, None), []
    ours_us, tuned = times[0]
    won = ours_us < GAIN * library_us
    if won:
        renewed.put_product(each, count, tuned)
    rate, found = each.weight_bytes / min(ours_us, library_us) / 1e6, str([*tuned])
    print(f"{each.operation} {shape} M={count}: library {library_us:.2f}, ours {ours_us:.2f} us, {found}", flush=True)
    line = each.operation, shape, count, library_us, ours_us, "ours" if won else "library", rate, found
    return line, [tuned for _, tuned in times[:FINALISTS]]
