"""A fleet of simulated groups behind schedulers, on a virtual clock, with requests that arrive at random: how many meet their objectives.

A scheduler drives so many groups and no more, so a large fleet has several, and each gets its share of the requests. To each of them
arrivals are as random as to all, so one is simulated, the one with the fewest groups: a fleet of hundreds costs what a dozen do.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from benchmarks import simulated_model
from benchmarks.virtual import Clock, VirtualWorker, latencies, metrics
from services.scheduler.ends import Rejected
from services.scheduler.group import Group
from services.scheduler.requests import Request
from services.scheduler.scheduler import Scheduler
from services.worker.engine.roofline import GPUS, MODELS, Roofline
from services.worker.engine.simulated import SimulatedDevice
from shared.protocol.plan import Limits

PAGE_SIZE = 16
LONGEST = 8  # times the mean: prompts and completions are cut there
WARM_UP_SHARE = 0.3  # of a run, that is not counted: queues and batches have to fill
CHECK_US = 100_000  # between two looks at whether a run can still meet its objectives
NO_LIMIT = 1 << 30
SEED = 0  # equal questions have equal answers


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


def simulate(fleet: Fleet, load: Load, objectives: Objectives, seconds: float) -> Outcome:
    """One run of so many seconds of virtual time, of the scheduler that has the fewest groups."""
    share = fleet.smallest_share
    load = replace(load, rate=load.rate * share / fleet.groups)
    return Run(replace(fleet, groups=share), load, objectives, seconds).outcome(fleet.groups / share)


class Run:
    def __init__(self, fleet: Fleet, load: Load, objectives: Objectives, seconds: float) -> None:
        self._load, self._objectives = load, objectives
        self._random = np.random.default_rng(SEED)
        self._clock = Clock()
        self._end_us, self._warm_s = round(seconds * 1e6), WARM_UP_SHARE * seconds
        self._expected = load.rate * (seconds - self._warm_s)
        self._late = 0  # that wait, and have missed already
        self._submitted = self._counted = self._met = self._missed = self._ended_tokens = 0
        self._ttfts: list[float] = []
        self._tpots: list[float] = []
        unread = metrics()
        self._scheduler = Scheduler(NO_LIMIT, NO_LIMIT, 0.0, self._deliver, unread, 0.0)
        roofline = Roofline(GPUS[fleet.gpu], MODELS[fleet.model], fleet.tensor_parallel_size)
        self._limits = Limits(
            slots=fleet.max_num_seqs,
            pages=roofline.cache_pages(PAGE_SIZE),
            page_size=PAGE_SIZE,
            max_length=LONGEST * (load.prompt_tokens + load.output_tokens),
            max_step_tokens=fleet.max_step_tokens,
            vocab_size=simulated_model.VOCAB_SIZE,
        )
        self._scheduler.model = simulated_model.model(self._limits.max_length)
        language = simulated_model.language(load.output_tokens)
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
                unread.engine(f"group-{number}"),
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
        prompt = simulated_model.random_ids(self._random, tokens)
        message = simulated_model.submit(self._submitted, prompt, LONGEST * load.output_tokens)
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
        times = latencies(request, now)
        if isinstance(request.end, Rejected) or times is None:
            self._missed += 1
            return
        ttft_s, tpot_s = times
        self._ttfts.append(ttft_s)
        self._tpots.append(tpot_s)
        met = ttft_s <= self._objectives.ttft_s and tpot_s <= self._objectives.tpot_s
        self._met, self._missed = self._met + met, self._missed + (not met)


def _percentiles(values: list[float]) -> tuple[float, float]:
    return (float(np.median(values)), float(np.quantile(values, 0.95))) if values else (math.nan, math.nan)
