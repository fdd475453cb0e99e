"""How many groups an arrival rate needs, so that enough of the requests meet their objectives: the scheduler on a virtual clock.

First the rate that one group sustains is found, which is quick; then as many groups as that asks for are simulated, and more or
fewer, until the smallest number is found that meets the objectives. A run stops as soon as too many requests have missed theirs.

A scheduler drives so many groups and no more, so a large fleet has several, and each gets its share of the requests. To each of them
arrivals are as random as to all, so one is simulated, the one with the fewest groups: a fleet of hundreds costs what a dozen do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from prometheus_client import CollectorRegistry
from rich.progress import Progress

from benchmarks.report import Plot, Report, Series
from benchmarks.virtual import Clock, VirtualWorker
from services.scheduler.ends import Rejected
from services.scheduler.group import Group
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.model import Model
from services.scheduler.requests import Request
from services.scheduler.scheduler import Scheduler
from services.worker.engine.roofline import GPUS, MODELS, Roofline
from services.worker.engine.simulated import Language, SimulatedDevice
from shared.protocol import generation_pb2 as pb
from shared.protocol.plan import Limits, ids_to_bytes

VOCAB_SIZE, EOS = 32_000, 2
PAGE_SIZE = 16
LONGEST = 8  # times the mean: prompts and completions are cut there
WARM_UP_SHARE = 0.3  # of a run, that is not counted: queues and batches have to fill
FIRST_RATE, LEAST_RATE, RATE_PRECISION = 4.0, 0.1, 0.05  # of the search for what one group sustains
LEAST_REQUESTS = 100  # of a run, that are counted
CHECK_US = 100_000  # between two looks at whether a run can still meet its objectives
NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class Load:
    """Requests that arrive at random, with prompts and completions of exponentially distributed length."""

    rate: float  # requests a second
    prompt_tokens: int  # on average, as is the next
    output_tokens: int


@dataclass(frozen=True)
class Objectives:
    """What `share` of the requests must meet, each both."""

    ttft_s: float
    tpot_s: float  # time per token after the first
    share: float


@dataclass(frozen=True)
class Fleet:
    """Equal groups, evenly behind as few schedulers as can drive them."""

    groups: int
    groups_per_scheduler: int  # at most
    gpu: str
    model: str
    tensor_parallel_size: int
    max_num_seqs: int
    max_step_tokens: int
    delay_us: int  # between scheduler and group, one way

    @property
    def smallest_share(self) -> int:
        """Groups of the scheduler that has the fewest."""
        return self.groups // -(-self.groups // self.groups_per_scheduler)


@dataclass(frozen=True)
class Outcome:
    """Of the requests that arrived after the warm-up. Those that have not ended are judged by what they have."""

    met: float
    whole: bool  # the run was not cut short
    requests: int
    ttft_s: tuple[float, float]  # median and 95th percentile, as is the next
    tpot_s: tuple[float, float]
    busy: float
    tokens_per_s: float  # of the fleet


def capacity(fleet: Fleet, load: Load, objectives: Objectives, seconds: float) -> Report:
    """`fleet.groups` is what is sought. Raises ValueError when not even an idle group meets the objectives."""
    tried: dict[int, Outcome] = {}
    with Progress(transient=True) as progress:
        task = progress.add_task("one group", total=None)
        one = _sustained_rate(replace(fleet, groups=1), load, objectives, seconds)

        def meets(groups: int) -> bool:
            progress.update(task, description=f"{groups} groups")
            if groups not in tried:
                tried[groups] = simulate(replace(fleet, groups=groups), load, objectives, seconds)
            return tried[groups].met >= objectives.share

        needed = _smallest(meets, math.ceil(load.rate / one))
    return _report(fleet, load, objectives, seconds, one, needed, tried)


def simulate(fleet: Fleet, load: Load, objectives: Objectives, seconds: float, seed: int = 0) -> Outcome:
    """One run of so many seconds of virtual time, of the scheduler that has the fewest groups."""
    share = fleet.smallest_share
    load = replace(load, rate=load.rate * share / fleet.groups)
    return _Run(replace(fleet, groups=share), load, objectives, seconds, seed).outcome(fleet.groups / share)


class _Run:
    def __init__(self, fleet: Fleet, load: Load, objectives: Objectives, seconds: float, seed: int) -> None:
        self._load, self._objectives = load, objectives
        self._random = np.random.default_rng(seed)
        self._clock = Clock()
        self._end_us, self._warm_s = round(seconds * 1e6), WARM_UP_SHARE * seconds
        self._expected = load.rate * (seconds - self._warm_s)
        self._late = 0  # that wait, and have missed already
        self._submitted = self._counted = self._met = self._missed = self._ended_tokens = 0
        self._ttfts: list[float] = []
        self._tpots: list[float] = []
        metrics = SchedulerMetrics("simulated", vllm_names=False, registry=CollectorRegistry())
        self._scheduler = Scheduler(NO_LIMIT, NO_LIMIT, 0.0, self._deliver, metrics, 0.0)
        roofline = Roofline(GPUS[fleet.gpu], MODELS[fleet.model], fleet.tensor_parallel_size)
        self._limits = Limits(
            slots=fleet.max_num_seqs,
            pages=roofline.cache_pages(PAGE_SIZE),
            page_size=PAGE_SIZE,
            max_length=LONGEST * (load.prompt_tokens + load.output_tokens),
            max_step_tokens=fleet.max_step_tokens,
            vocab_size=VOCAB_SIZE,
        )
        self._scheduler.model = Model("simulated", VOCAB_SIZE, self._limits.max_length, frozenset({EOS}), ())
        language = Language(VOCAB_SIZE, (EOS,), load.output_tokens)
        self._workers = []
        for number in range(fleet.groups):
            worker = VirtualWorker(self._clock, SimulatedDevice(self._limits, language, roofline), fleet.delay_us)
            worker.group = Group(
                f"group-{number}",
                self._limits,
                0,
                fleet.max_step_tokens,
                True,
                worker.send,
                self._scheduler.deliver,
                metrics.engine(f"group-{number}"),
                wake=worker.wake,
            )
            self._scheduler.add_group(worker.group, 0.0)
            self._workers.append(worker)

    def outcome(self, schedulers: float) -> Outcome:
        """schedulers: that the fleet has, in terms of this one."""
        self._arrive()
        self._run_until(self._warm_s)
        busy_us, tokens = self._busy_us(), self._tokens()
        # Whoever arrived last has time to begin; others go on arriving meanwhile, so that it is as busy as before.
        self._run_until(self._end_us / 1e6 + self._objectives.ttft_s)
        now = self._clock.now_s
        measured_s = now - self._warm_s
        busy = (self._busy_us() - busy_us) / 1e6 / measured_s / len(self._workers)
        tokens_per_s = (self._tokens() - tokens) / measured_s * schedulers
        for request in self._running():
            if self._counts(request.arrived_at):
                self._judge(request, now)
        return Outcome(
            met=self._met / max(self._counted, 1) if self._may_meet else 0.0,
            whole=self._may_meet,
            requests=self._counted,
            ttft_s=_percentiles(self._ttfts),
            tpot_s=_percentiles(self._tpots),
            busy=busy,
            tokens_per_s=tokens_per_s,
        )

    def _run_until(self, seconds: float) -> None:
        """Or until too many have missed."""
        until_us = round(seconds * 1e6)
        while self._clock.now_us < until_us and self._may_meet:
            self._clock.run(min(self._clock.now_us + CHECK_US, until_us))
            late = self._clock.now_s - self._objectives.ttft_s
            self._late = sum(
                self._counts(request.arrived_at) and request.arrived_at < late and not request.output
                for worker in self._workers
                for request in worker.group.waiting
            )

    def _running(self) -> list[Request]:
        return [request for worker in self._workers for request in worker.group.running()]

    def _busy_us(self) -> int:
        return sum(worker.busy_us for worker in self._workers)

    def _tokens(self) -> int:
        """So far, of all requests."""
        return self._ended_tokens + sum(len(request.output) for request in self._running())

    @property
    def _may_meet(self) -> bool:
        return self._missed + self._late <= max((1 - self._objectives.share) * self._expected, 1)

    def _arrive(self) -> None:
        now, load = self._clock.now_s, self._load
        self._clock.after(round(self._random.exponential(1e6 / load.rate)), self._arrive)
        self._submitted += 1
        self._counted += self._counts(now)
        tokens = int(np.clip(self._random.exponential(load.prompt_tokens), 1, (LONGEST - 1) * load.prompt_tokens))
        message = pb.Submit(
            request=self._submitted,
            attempt=1,
            prompt_ids=ids_to_bytes(self._random.integers(EOS + 1, VOCAB_SIZE, tokens).astype(np.int32)),
            max_tokens=LONGEST * load.output_tokens,
            sampling=pb.Sampling(temperature=0, seed=1),
        )
        if (rejected := self._scheduler.submit(message, 1, now)) is not None:
            raise RuntimeError(f"the scheduler rejects requests of this load: {rejected.detail}")

    def _counts(self, arrived_at: float) -> bool:
        return self._warm_s <= arrived_at and arrived_at * 1e6 < self._end_us

    def _deliver(self, updated: list[Request], now: float) -> None:
        for request in updated:
            if request.end is None:
                continue
            self._ended_tokens += len(request.output)
            if self._counts(request.arrived_at):
                self._judge(request, now)

    def _judge(self, request: Request, now: float) -> None:
        if isinstance(request.end, Rejected) or request.first_token_at is None:
            self._missed += 1
            return
        ttft_s = request.first_token_at - request.arrived_at
        tpot_s = (now - request.first_token_at) / max(len(request.output) - 1, 1)
        self._ttfts.append(ttft_s)
        self._tpots.append(tpot_s)
        met = ttft_s <= self._objectives.ttft_s and tpot_s <= self._objectives.tpot_s
        self._met, self._missed = self._met + met, self._missed + (not met)


def _percentiles(values: list[float]) -> tuple[float, float]:
    return (float(np.median(values)), float(np.quantile(values, 0.95))) if values else (math.nan, math.nan)


def _sustained_rate(fleet: Fleet, load: Load, objectives: Objectives, seconds: float) -> float:
    """Requests a second that one group serves within the objectives."""

    def meets(rate: float) -> bool:
        enough_s = LEAST_REQUESTS / rate / (1 - WARM_UP_SHARE)
        return simulate(fleet, replace(load, rate=rate), objectives, max(seconds, enough_s)).met >= objectives.share

    low = min(FIRST_RATE, load.rate)
    while not meets(low):
        low /= 2
        if low < LEAST_RATE:
            raise ValueError(f"a group with {low:g} requests/s does not meet the objectives: relax them, or take other GPUs")
    high = 2 * low
    while high < load.rate and meets(high):
        low, high = high, 2 * high
    while high - low > RATE_PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def _smallest(meets: Callable[[int], bool], guess: int) -> int:
    """The smallest number that meets, sought in steps of 5 % around a guess, then one by one within the last step."""
    number, step = guess, max(guess // 20, 1)
    while not meets(number):
        number += step
    low = number - 1 if step == 1 else number - step
    while low >= 1 and meets(low):
        number, low = low, low - step
    low = max(low, 0)  # which does not meet, or is no fleet
    while number - low > 1:
        middle = (low + number) // 2
        low, number = (low, middle) if meets(middle) else (middle, number)
    return number


def _report(fleet: Fleet, load: Load, objectives: Objectives, seconds: float, one: float, needed: int, tried: dict[int, Outcome]) -> Report:
    counts = sorted(tried)
    whole = [count for count in counts if tried[count].whole]
    return Report(
        name="capacity",
        columns=("groups", "met %", "TTFT p50 ms", "TTFT p95 ms", "TPOT p50 ms", "TPOT p95 ms", "busy %", "tok/s", "requests"),
        rows=[_row(count, tried[count]) for count in counts],
        notes=(
            f"{needed} groups are needed: {fleet.model} on {fleet.tensor_parallel_size} x {fleet.gpu}, {load.rate:g} requests/s of "
            f"{load.prompt_tokens} prompt and {load.output_tokens} completion tokens on average",
            f"objectives, for {objectives.share:.0%}: TTFT {objectives.ttft_s * 1e3:g} ms and then {objectives.tpot_s * 1e3:g} ms a token",
            f"each scheduler drives at most {fleet.groups_per_scheduler} groups; one of them is simulated, with its share of the requests",
            f"one group alone sustains {one:.2f} requests/s; runs of {seconds:g} s of virtual time; cut short when it was clear: met 0",
        ),
        plots=(
            Plot(
                f"{load.rate:g} requests/s: {needed} groups are needed",
                "groups",
                "requests that meet their objectives, %",
                [Series("met", whole, [tried[count].met * 100 for count in whole])],
            ),
            Plot(
                "Latency by the number of groups",
                "groups",
                "ms",
                [
                    Series("TTFT, 95th percentile", whole, [tried[count].ttft_s[1] * 1e3 for count in whole]),
                    Series("time per token, 95th percentile", whole, [tried[count].tpot_s[1] * 1e3 for count in whole]),
                ],
            ),
        ),
        raw={"needed": needed, "one_group_requests_per_s": one},
    )


def _row(groups: int, outcome: Outcome) -> tuple[int | float | None, ...]:
    if not outcome.whole:
        return (groups, 0.0, None, None, None, None, outcome.busy * 100, outcome.tokens_per_s, outcome.requests)
    times = (*outcome.ttft_s, *outcome.tpot_s)
    return (groups, outcome.met * 100, *(time_s * 1e3 for time_s in times), outcome.busy * 100, outcome.tokens_per_s, outcome.requests)
