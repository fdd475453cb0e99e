"""Where the language model's head is to choose as it multiplies, and by what tiles: `python -m benchmarks tune-head`.

A pool of processes compiles the candidates of `kernels.offering_head`; they are timed over replays of a graph whose weights rotate
through memory, each behind the norm of its rows and with all that chooses after it: rows that are greedy, that have a temperature, and
that have a top-p, whose logits it writes for nothing to be gained. What takes the least together is written to the table of this GPU
(`kernels/tuning_*.json`) if that is less, by more than noise, than the head's logits and the choice from them take.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.candidates import Product, head
from benchmarks.launches import DTYPE, time_launches
from benchmarks.products import TOLERANCE, Inputs, behind_norm
from benchmarks.report import Report, Value
from benchmarks.tuning import PROCESSES, RenewedTable, compilers
from kernels.linear import widened_linear
from kernels.offering_head import Config, offering_head_triton
from kernels.offers import best_offer
from kernels.sampling import greedy, sample
from services.worker.engine.sampling import Sampling
from shared.errors import ConfigError

ROWS = (1, 8, 16, 32, 64, 128, 256)
WAYS = ("greedy", "temperature", "top-p")
ROUGH_WAY = "temperature"
ROUGH_REPLAYS, FINE_REPLAYS, FINALISTS = 3, 15, 5
GAIN = 0.98  # of the time by the logits, that a configuration must stay below
MAX_SHARED_BYTES = 225 * 1024


def asked(way: str, rows: int) -> Sampling:
    ones = torch.ones(rows, device="cuda")
    numbers = torch.arange(rows, dtype=torch.int32, device="cuda")
    top_p, asks = (0.9 * ones, torch.ones_like(numbers)) if way == "top-p" else (ones, torch.zeros_like(numbers))
    return Sampling(0.7 * ones, torch.zeros_like(numbers), top_p, 0 * ones, numbers.long(), numbers, asks)


def candidates(rows: int) -> Iterator[Config]:
    """For few rows columns on the tall side of the tensor cores' product; one is tried without; for many, tiles of many rows."""
    if rows == 1:
        for columns, inner, stages in product((8, 16, 32), (256, 512), (3, 5)):
            yield Config(1, columns, inner, 4, stages, 0)
    if rows <= 64:
        row_block = max(8, rows)
        for columns, inner, warps, stages in product((64, 128), (64, 128, 256), (4, 8), (3, 4, 5, 6)):
            if (stages - (row_block == 8)) * DTYPE.itemsize * inner * (columns + row_block) <= MAX_SHARED_BYTES and columns * inner >= 8192:
                yield Config(row_block, columns, inner, warps, stages, 1)
    if rows >= 64:
        for row_block, columns, warps, stages in product((64, 128, 256), (128, 256), (4, 8), (3, 4, 5, 6)):
            sums = row_block * columns // (32 * warps)  # of a thread
            fits = stages * DTYPE.itemsize * 64 * (columns + row_block) <= MAX_SHARED_BYTES
            if fits and row_block <= rows and 32 <= sums <= 128:
                yield Config(row_block, columns, 64, warps, stages, 0)


def choose(way: str, how: Sampling, x: Tensor, weight: Tensor, tuned: Config | None) -> Tensor:
    """All that leads from hidden states to tokens. None: by the logits."""
    if tuned is None:
        whole = widened_linear(x, weight)
        return greedy(whole) if way == "greedy" else sample(whole, *how.tensors)
    noise, asks = None if way == "greedy" else how.noise, how.asks if way == "top-p" else None
    scores = offering_head_triton(x, weight, len(weight), 0, noise, asks, False, tuned)
    return best_offer(scores.wanted_offers) if scores.logits is None else sample(scores.logits, *how.tensors, offers=scores.offers)


def compile_some(rows: int, size: int, configs: Sequence[Config]) -> None:
    """Each of them in every way, into the cache that all processes share."""
    x, weight = torch.zeros(rows, size, device="cuda", dtype=DTYPE), torch.zeros(2048, size, device="cuda", dtype=DTYPE)
    for tuned, way in product(configs, WAYS):
        try:
            choose(way, asked(way, rows), x, weight, tuned)
        except OutOfResources as error:
            print(f"{tuned}: {error}", flush=True)
            break


class HeadTuner:
    """One head with so many rows."""

    def __init__(self, each: Product, rows: int) -> None:
        self.each, self.rows, self.inputs = each, rows, Inputs(each, rows)
        self._expected = widened_linear(self.inputs.x, self.inputs.weights[0])

    def us(self, way: str, tuned: Config | None, replays: int) -> float:
        how, x, norm = asked(way, self.rows), self.inputs.x, self.inputs.norm
        launches = [partial(behind_norm, partial(choose, way, how, x, weight, tuned), norm) for weight in self.inputs.weights]
        return time_launches(launches, replays).median_us

    def is_right(self, tuned: Config) -> bool:
        """Whether it fits, its logits are the library's, and what its offers choose is what these choose."""
        how, weight = asked(ROUGH_WAY, self.rows), self.inputs.weights[0]
        try:
            scores = offering_head_triton(self.inputs.x, weight, len(weight), 0, how.noise, None, True, tuned)
        except OutOfResources:
            return False
        close = torch.allclose(scores.wanted_logits, self._expected, rtol=TOLERANCE, atol=TOLERANCE)
        if not (close and torch.equal(best_offer(scores.wanted_offers), sample(scores.wanted_logits, *how.tensors))):
            print(f"WRONG: {self.each.shape} {self.rows} rows {tuned}", flush=True)
            return False
        return True

    def decide(self) -> tuple[Sequence[Value], Config | None]:
        """A line of the report, and what is to be in the table."""
        times = sorted((self.us(ROUGH_WAY, tuned, ROUGH_REPLAYS), tuned) for tuned in candidates(self.rows) if self.is_right(tuned))
        before = [self.us(way, None, FINE_REPLAYS) for way in WAYS]
        if not times:
            return [self.each.shape, self.rows, *(each for us in before for each in (us, None)), "logits", None], None
        finals = [([self.us(way, tuned, FINE_REPLAYS) for way in WAYS], tuned) for _, tuned in times[:FINALISTS]]
        after, tuned = min(finals, key=lambda final: sum(final[0]))
        won = sum(after) < GAIN * sum(before)
        line: list[Value] = [self.each.shape, self.rows]
        for us in zip(before, after, strict=True):
            line += us
        line += ["offers" if won else "logits", str([*tuned])]
        print(*(f"{value:.1f}" if isinstance(value, float) else value for value in line), flush=True)
        return line, tuned if won else None


def tune_head(models: Sequence[str], rows: Sequence[int], ranks: Sequence[int], limit_s: float, out: Path) -> Report:
    """Needs a GPU; what is not reached within the time stays as it is in the table of this GPU. ranks: the sizes of groups whose ranks'
    shapes are tuned. Raises ConfigError without a GPU, and for numbers of rows that are no powers of two."""
    for count in rows:
        if count & (count - 1):
            raise ConfigError(f"rows: {count} is no power of two, and workers compile the entries of those")
    if not torch.cuda.is_available():
        raise ConfigError("heads are tuned on a GPU, and none is here")
    deadline = time.monotonic() + limit_s
    renewed = RenewedTable(out)
    shapes = list(dict.fromkeys(head(model, size) for size in ranks for model in models))
    lines: list[Sequence[Value]] = []
    with compilers() as pool:
        compiling = {
            count: [pool.submit(compile_some, count, shapes[0].size, configs[first::PROCESSES]) for first in range(PROCESSES)]
            for count, configs in ((count, list(candidates(count))) for count in rows)
        }
        for count in rows:
            for each in compiling[count]:
                each.result()
            for shape in shapes:
                if time.monotonic() > deadline:
                    print(f"{shape.shape}, {count} rows: no time", flush=True)
                    continue
                line, tuned = HeadTuner(shape, count).decide()
                lines.append(line)
                renewed.put("offering_head", shape.shape, count, list(tuned or ()))
                renewed.write()
    timed = [f"{way}, {by} us" for way in WAYS for by in ("logits", "offers")]
    return Report(
        name="tune-head",
        columns=("head", "rows", *timed, "winner", "configuration"),
        rows=lines,
        notes=(f"the table is in {renewed.path}: copy it to kernels/",),
    )
