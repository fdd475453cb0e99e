"""Finds the fastest configurations of a mixture of experts, for the shapes of models: `python -m benchmarks tune-experts`.

A pool of processes compiles the candidates; then all launches of the experts are timed together, over replays of a graph: first with
one configuration of gate and up after the other, then, beside the fastest of these, of down. What is fastest for a number of tokens is
written to the table of this GPU (`kernels/tuning_*.json`).
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.launches import DTYPE, Launch, randn, time_launches
from benchmarks.report import Report, Value
from benchmarks.tuning import PROCESSES, RenewedTable, compilers
from benchmarks.workload import config_file
from kernels.moe import moe, moe_torch
from kernels.moe_grouped import MOST_RANKED_TOKENS, GroupedConfig, grouped_product_triton, moe_grouped_triton
from kernels.routing import assign_triton
from kernels.silu_and_mul import silu_and_mul
from kernels.tuning import Table
from services.worker.engine.roofline import Shape
from shared.errors import ConfigError

TOKENS = (1, 8, 128, 16384, 1024, 256, 32, 2048, 512, 4, 2, 16)  # those first that matter most, for the time may be short
LIBRARY_TOKENS = 1024  # from here on torch's grouped product is tried beside
REPLAYS, ROUTES = 4, 8
MAX_ERROR = 0.02  # of a row, relative


class Mixture(NamedTuple):
    experts: int
    choices: int
    hidden: int
    inner: int

    @classmethod
    def of(cls, model: str) -> "Mixture":
        """By the name of its shape. Raises ConfigError for a dense one."""
        shape = Shape.from_config(json.loads(config_file(model).read_text()))
        if shape.experts == 1:
            raise ConfigError(f"{model} has no experts to tune")
        return cls(shape.experts, shape.experts_per_token, shape.hidden_size, shape.intermediate_size)

    def weight_bytes(self, chosen: float) -> float:
        """Of so many experts."""
        return chosen * 3 * self.hidden * self.inner * DTYPE.itemsize


class Weights(NamedTuple):
    gate_up: Tensor
    down: Tensor


def _grouped_candidates(mixture: Mixture, tokens: int, gated: bool) -> Iterator[GroupedConfig]:
    """Rows of a tile about the mean of an expert's."""
    mean = tokens * mixture.choices / mixture.experts
    if mean <= 32:
        heights = (16,) if mean <= 8 else (16, 32)
        pointed = [(32, 256, 4, 3), (64, 128, 4, 3)] if gated else [(64, 128, 4, 4), (32, 256, 4, 3), (128, 128, 4, 3)]
        copied = [(32, 256, 4, 3), (64, 128, 4, 4), (32, 128, 4, 4)] if gated else [(128, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 3)]
        tall = [(64, 128, 4, 3), (64, 64, 4, 6), (128, 64, 4, 3)] if gated else [(128, 128, 4, 3), (64, 128, 4, 5), (128, 64, 4, 4)]
        yield from (GroupedConfig(height, *tile, 1, 0, 0) for height, tile in product(heights, copied))
        yield from (GroupedConfig(height, *tile, 1, 0, 1) for height, tile in product((8, *heights), tall))
        yield from (GroupedConfig(height, *tile, 0, ahead, 0) for height, tile, ahead in product(heights, pointed, (0, 2)))
        yield from (GroupedConfig(height, *tall[0], 0, ahead, 1) for height, ahead in product(heights, (0, 2)))
    elif mean <= 96:
        tiles = (
            [(64, 128, 64, 4, 3), (64, 128, 64, 8, 3), (64, 64, 64, 4, 3), (64, 64, 64, 4, 4), (128, 64, 64, 8, 4), (128, 64, 64, 4, 3)]
            if gated
            else [(128, 128, 64, 4, 3), (64, 128, 64, 4, 3), (64, 128, 64, 4, 4), (64, 256, 64, 8, 3), (128, 128, 64, 8, 4)]
        )
        yield from (GroupedConfig(*tile, 1, 0, tall) for tile, tall in product(tiles, (0, 1)))
        yield from (GroupedConfig(*tile, 0, 0, tall) for tile, tall in product(tiles[:3], (0, 1)))
        yield from (GroupedConfig(32, *tile, 1, 0, 1) for tile in ((64, 128, 4, 3), (128, 64, 4, 3)))
    else:
        tiles = (
            [
                (128, 128, 64, 8, 4),
                (128, 128, 64, 8, 3),
                (128, 64, 64, 4, 3),
                (64, 128, 64, 4, 3),
                (256, 64, 64, 8, 3),
                (128, 128, 128, 8, 2),
            ]
            if gated
            else [(128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 4, 3), (256, 128, 64, 8, 3), (128, 256, 128, 8, 2)]
        )
        yield from (GroupedConfig(*tile, 1, 0, 0) for tile in tiles)
        yield GroupedConfig(*tiles[0], 1, 0, 1)
        yield GroupedConfig(*tiles[0], 0, 0, 0)


class Job(NamedTuple):
    """What a kernel is compiled for."""

    mixture: Mixture
    gated: bool
    tuned: GroupedConfig


def _jobs(mixture: Mixture, counts: Iterable[int]) -> list[Job]:
    kinds = ((tokens, gated) for tokens in counts for gated in (True, False))
    return list(
        dict.fromkeys(Job(mixture, gated, tuned) for tokens, gated in kinds for tuned in _grouped_candidates(mixture, tokens, gated))
    )


def compile_jobs(jobs: Sequence[Job]) -> None:
    """Compiles each, into the cache that all processes share; no expert has a token."""
    for mixture, gated, tuned in jobs:
        inner, hidden, experts = mixture.inner, mixture.hidden, mixture.experts
        tokens = 2
        weights = Weights(*(torch.empty(experts, *each, device="cuda", dtype=DTYPE) for each in ((2 * inner, hidden), (hidden, inner))))
        x = torch.zeros(tokens * mixture.choices, hidden if gated else inner, device="cuda", dtype=DTYPE)
        try:
            order = torch.zeros(experts, tokens, device="cuda", dtype=torch.int32)
            grouped_product_triton(x, weights[0 if gated else 1], order, order[:, 0].contiguous(), mixture.choices, gated, tuned)
        except OutOfResources as error:
            print(f"{tuned}: {error}", flush=True)


def compile_assignment(mixture: Mixture, tokens: int) -> None:
    """What finds the experts of so many tokens, and the experts as they stand."""
    inner, hidden, experts = mixture.inner, mixture.hidden, mixture.experts
    weights = Weights(*(torch.empty(experts, *each, device="cuda", dtype=DTYPE) for each in ((2 * inner, hidden), (hidden, inner))))
    logits, x = torch.zeros(tokens, experts, device="cuda", dtype=DTYPE), torch.zeros(tokens, hidden, device="cuda", dtype=DTYPE)
    moe(x, *weights, logits, mixture.choices, True)
    assign_triton(logits, mixture.choices, True, tokens > MOST_RANKED_TOKENS)


class Routed(NamedTuple):
    """Tokens, and what a router says of them."""

    x: Tensor
    logits: Tensor


class Grouped(NamedTuple):
    us: float
    tuned: tuple[GroupedConfig, GroupedConfig]


class Case:
    """So many tokens; a few of them with several routes, so that the weights come from memory."""

    def __init__(self, mixture: Mixture, weights: Weights, tokens: int) -> None:
        self.mixture, self.weights, self.tokens = mixture, weights, tokens
        routes = ROUTES if tokens <= 32 else 1
        self.routed = [Routed(randn(tokens, mixture.hidden), randn(tokens, mixture.experts)) for _ in range(routes)]
        first = self.routed[0]
        self.expected = moe_torch(first.x, *weights, first.logits, mixture.choices, True).float()
        chosen = [len(each.logits.topk(mixture.choices).indices.unique()) for each in self.routed]
        self.weight_bytes = mixture.weight_bytes(sum(chosen) / routes)
        self.operations = 6.0 * tokens * mixture.choices * mixture.hidden * mixture.inner

    def time(self, what: str, computes: Callable[[Routed], Tensor]) -> float | None:
        """Microseconds; None, and a line that tells, where it does not fit or computes something else."""
        try:
            got = computes(self.routed[0]).float()
        except OutOfResources:
            return None
        error = float(((got - self.expected).norm(dim=1) / self.expected.norm(dim=1)).max())
        if not error < MAX_ERROR:
            print(f"WRONG: {self.tokens} tokens, {what}: error {error:.3g}", flush=True)
            return None
        launches: list[Launch] = [partial(computes, each) for each in self.routed]
        return time_launches(launches, REPLAYS).median_us

    def standing(self, each: Routed) -> Tensor:
        return moe(each.x, *self.weights, each.logits, self.mixture.choices, True)

    def grouped(self, tuned: tuple[GroupedConfig, GroupedConfig], each: Routed) -> Tensor:
        return moe_grouped_triton(each.x, *self.weights, each.logits, self.mixture.choices, True, *tuned)

    def best_grouped(self) -> Grouped | None:
        times: list[Grouped] = []
        firsts, seconds = (list(_grouped_candidates(self.mixture, self.tokens, gated)) for gated in (True, False))
        for first in firsts:
            self._try(times, (first, seconds[0]))
        best = min(times).tuned[0] if times else firsts[0]
        for second in seconds[1:]:
            self._try(times, (best, second))
        for us, pair in sorted(times)[:4]:
            print(f"  {self.tokens} tokens: {us:.1f} us {[[*each] for each in pair]}", flush=True)
        return min(times, default=None)

    def _try(self, times: list[Grouped], pair: tuple[GroupedConfig, GroupedConfig]) -> None:
        if (us := self.time(str(pair), partial(self.grouped, pair))) is not None:
            times.append(Grouped(us, pair))

    def library(self) -> float | None:
        """With torch's grouped products, and given the order of the rows, which ours have to find."""
        first, choices = self.routed[0], self.mixture.choices
        probabilities, order, counts = assign_triton(first.logits, choices, False, True)
        rows = torch.cat([order[expert, :count] for expert, count in enumerate(counts.tolist())]).long()
        places, offsets, weights = rows.argsort(), counts.cumsum(0).int(), [each.transpose(1, 2) for each in self.weights]
        shares = (probabilities / probabilities.sum(dim=1, keepdim=True)).to(DTYPE)[:, None]

        def compute(each: Routed) -> Tensor:
            activated = silu_and_mul(torch._grouped_mm(each.x[rows // choices], weights[0], offs=offsets))
            results = torch._grouped_mm(activated, weights[1], offs=offsets)[places]
            return torch.bmm(shares, results.view(self.tokens, choices, -1))[:, 0]

        return self.time("torch._grouped_mm", compute)


def tune_experts(models: Sequence[str], tokens: Sequence[int], limit_s: float, out: Path) -> Report:
    """Needs a GPU; what is not reached within the time stays as it is in the table of this GPU. Raises ConfigError without one."""
    if not torch.cuda.is_available():
        raise ConfigError("experts are tuned on a GPU, and none is here")
    deadline = time.monotonic() + limit_s
    mixtures = list(dict.fromkeys(Mixture.of(model) for model in models))
    jobs = [job for mixture in mixtures for job in _jobs(mixture, tokens)]
    with compilers() as pool:
        waiting = [pool.submit(compile_assignment, mixture, count) for mixture in mixtures for count in tokens]
        list(pool.map(compile_jobs, [jobs[first::PROCESSES] for first in range(PROCESSES)]))
        for each in waiting:
            each.result()
    print(f"{len(jobs)} candidates are compiled, {deadline - time.monotonic():.0f} s left", flush=True)
    renewed = RenewedTable(out)
    lines: list[Sequence[Value]] = []
    for mixture in mixtures:
        gate_up = randn(mixture.experts, 2 * mixture.inner, mixture.hidden) / mixture.hidden**0.5
        weights = Weights(gate_up, randn(mixture.experts, mixture.hidden, mixture.inner) / mixture.inner**0.5)
        for count in tokens:
            if time.monotonic() > deadline:
                break
            lines.append(_decide(Case(mixture, weights, count), renewed.entries))
            renewed.write()
    return Report(
        name="tune-experts",
        columns=("experts", "tokens", "now us", "best us", "library us", "TB/s", "TFLOP/s", "configuration"),
        rows=lines,
        notes=(f"route and all that follows; the table is in {renewed.path}: copy it to kernels/",),
    )


def _decide(case: Case, tuned_table: Table) -> Sequence[Value]:
    """Times the candidates, and writes the winner into the table; a line of the report."""
    now_us = case.time("as it stands", case.standing)
    best = case.best_grouped()
    library_us = case.library() if case.tokens >= LIBRARY_TOKENS else None
    name = "{}x{}x{}x{}".format(*case.mixture)
    entries = tuned_table.setdefault("moe", {}).setdefault(name, {})
    entries.pop(str(case.tokens), None)
    if best is None:
        return name, case.tokens, now_us, None, library_us, None, None, None
    numbers = [number for config in best.tuned for number in config]
    entries[str(case.tokens)] = numbers
    rates = case.weight_bytes / best.us / 1e6, case.operations / best.us / 1e6
    line = name, case.tokens, now_us, best.us, library_us, *rates, str(numbers)
    print(*line, flush=True)
    return line
