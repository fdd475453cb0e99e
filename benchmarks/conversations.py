"""A load like that of a chat service, on the virtual clock: conversations of several turns after a few common system prompts.

Every turn brings the whole conversation, so most of its prompt is in the prefix cache if that has kept it. One group; measured is what
its policy does to first tokens and to the gaps between tokens, and what its cache finds beside the same cache replayed by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import simulated_model
from benchmarks.lru import LruReplay
from benchmarks.virtual import Clock, VirtualWorker, latencies, metrics
from services.scheduler.group import Group
from services.scheduler.policy import PolicyName
from services.scheduler.prefix_cache import RadixCache
from services.scheduler.requests import Request
from services.scheduler.results import Results
from services.scheduler.slots import Rows
from services.scheduler.steps import Outstanding, StepResult
from services.scheduler.validation import to_request
from services.worker.engine.roofline import GPUS, MODELS, Roofline
from services.worker.engine.simulated import SimulatedDevice
from shared.protocol.plan import Int32s, Limits

PAGE_SIZE = 16
LONGEST_ANSWER = 4  # times the mean
WARM_UP_SHARE = 0.3
SEED = 0  # equal questions have equal answers
TTFT_S, TPOT_S, GAP_S = 0.5, 0.025, 0.25  # what a good request meets: first token, mean time per token, longest gap


@dataclass(frozen=True)
class Traffic:
    """Lengths and times are exponentially distributed around these means, but for the system prompts'; turns geometrically."""

    conversations_per_s: float
    turns: float = 4.0
    systems: int = 8
    system_tokens: int = 600
    user_tokens: int = 150
    answer_tokens: int = 150
    think_s: float = 2.0  # from an answer to the next turn


@dataclass(frozen=True)
class Setup:
    """One group."""

    policy: PolicyName = "mixed"
    gpu: str = "h200"
    model: str = "8b"
    slots: int = 128
    pages: int = 12_000
    max_step_tokens: int = 512
    max_length: int = 8_192
    delay_us: int = 1_000


class Opened(NamedTuple):
    """A request has got a slot, with so many tokens from the cache."""

    slot: int
    ids: Int32s
    cached_tokens: int


class Closed(NamedTuple):
    """A slot is given back; these tokens stay."""

    slot: int
    ids: Int32s


@dataclass
class Measured:
    """Of requests that arrived after the warm-up; gaps and steps are all that happened after it."""

    seconds: float
    ttft_s: list[float] = field(default_factory=list)
    good: int = 0
    gaps_s: list[NDArray[np.float64]] = field(default_factory=list)
    full_steps_us: list[int] = field(default_factory=list)  # of steps as large as they may be
    events: list[Opened | Closed] = field(default_factory=list)  # from the start

    @property
    def goodput(self) -> float:
        """Good requests a second."""
        return self.good / self.seconds

    def gap_s(self, quantile: float) -> float:
        """Of the time between two tokens of a request."""
        return float(np.quantile(np.concatenate(self.gaps_s), quantile))

    @property
    def full_step_s(self) -> float:
        return float(np.median(self.full_steps_us)) / 1e6

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that came from the cache."""
        opened = [event for event in self.events if isinstance(event, Opened)]
        return sum(event.cached_tokens for event in opened) / sum(len(event.ids) for event in opened)


def converse(traffic: Traffic, setup: Setup, seconds: float) -> Measured:
    """One run of so many seconds of virtual time."""
    return _Run(traffic, setup, seconds).measured()


def replayed_hit_rate(events: Sequence[Opened | Closed], pages: int) -> float:
    """Of the same cache by itself, with what came in the same order.

    pages: of the pool. Running requests hold pages that are in no cache yet: those of their answers, on average half of them.
    """
    growth = {}  # pages of the answer that begins with this event
    started: dict[int, int] = {}
    for number, event in enumerate(events):
        if isinstance(event, Opened):
            started[event.slot] = number
        elif event.slot in started:
            prompt = events[started[event.slot]].ids
            growth[started.pop(event.slot)] = (len(event.ids) - len(prompt)) / PAGE_SIZE
    cache = LruReplay(pages, PAGE_SIZE)
    running: dict[int, tuple[Int32s, float]] = {}
    hits = tokens = 0
    for number, event in enumerate(events):
        if isinstance(event, Opened):
            running[event.slot] = event.ids, growth.get(number, 0.0) / 2 + 1
        cache.capacity = pages - round(sum(held for _, held in running.values()))
        if isinstance(event, Opened):
            hits += cache.open(event.ids)
            tokens += len(event.ids)
        elif event.slot in running:
            prompt, _ = running.pop(event.slot)
            cache.close(prompt, event.ids)
    return hits / tokens


class _NotedResults(Results):
    """Notes gaps and steps, which here are too long to come in bursts."""

    def note(self, measured: Measured, from_s: float, full_step_tokens: int, stuttered: set[Request]) -> None:
        self._measured, self._from_s, self._full_step_tokens, self._stuttered = measured, from_s, full_step_tokens, stuttered

    def take(self, result: StepResult, plan: Outstanding, extremes: tuple[int, int], last_plan: int) -> None:
        if self._occupancy.now >= self._from_s and plan.decode_rows + plan.prefill_tokens == self._full_step_tokens:
            self._measured.full_steps_us.append(result.end_us - result.start_us)
        super().take(result, plan, extremes, last_plan)

    def _time(self, rows: Rows, tokens: Int32s, step_s: float, *, begin: bool, lack: bool) -> None:
        if self._occupancy.now >= self._from_s:
            gaps_s = self._occupancy.now - self._slots.last_token_at[rows]
            self._measured.gaps_s.append(gaps_s[~np.isnan(gaps_s)])
            self._stuttered.update(self._slots.requests[rows[gaps_s > GAP_S]].tolist())
        super()._time(rows, tokens, step_s, begin=begin, lack=lack)


class _NotedCache(RadixCache):
    """Notes who comes and goes."""

    events: list[Opened | Closed]

    def open(self, slot: int, namespace: str, ids: Int32s, reuse: bool = True) -> Int32s:
        pages = super().open(slot, namespace, ids, reuse)
        self.events.append(Opened(slot, ids, len(pages) * PAGE_SIZE))
        return pages

    def close(self, slot: int, pages: Int32s, ids: Int32s, last_plan: int) -> None:
        super().close(slot, pages, ids, last_plan)
        self.events.append(Closed(slot, ids))


@dataclass(eq=False)
class _Conversation:
    ids: Int32s  # so far
    turns: int  # that are left
    answered: int = 0  # tokens of the answer that runs


class _Run:
    def __init__(self, traffic: Traffic, setup: Setup, seconds: float) -> None:
        self._traffic, self._setup = traffic, setup
        self._random = np.random.default_rng(SEED)
        self._clock = Clock()
        self._warm_s, self._end_s = WARM_UP_SHARE * seconds, seconds
        self._found = Measured(seconds - self._warm_s)
        self._stuttered: set[Request] = set()  # had a gap longer than a good request may have
        self._conversations: dict[int, _Conversation] = {}  # by the request that runs
        self._systems = [self._words(traffic.system_tokens) for _ in range(traffic.systems)]
        self._submitted = 0
        limits = Limits(
            slots=setup.slots,
            pages=setup.pages,
            page_size=PAGE_SIZE,
            max_length=setup.max_length,
            max_step_tokens=setup.max_step_tokens,
            vocab_size=simulated_model.VOCAB_SIZE,
        )
        self._model = simulated_model.model(limits.max_length)
        language, roofline = simulated_model.language(traffic.answer_tokens), Roofline(GPUS[setup.gpu], MODELS[setup.model])
        worker = VirtualWorker(self._clock, SimulatedDevice(limits, language, roofline), setup.delay_us)
        engine = metrics().engine("group-0")
        group = Group("group-0", limits, 0, setup.max_step_tokens, True, worker.send, self._deliver, engine, policy=setup.policy)
        group.results = results = _NotedResults("group-0", group.occupancy, engine)
        results.note(self._found, self._warm_s, setup.max_step_tokens, self._stuttered)
        cache = _NotedCache(group.memory.pool, PAGE_SIZE)
        cache.events = self._found.events
        group.memory.cache = cache
        self._group = worker.group = group

    def measured(self) -> Measured:
        self._begin()
        self._clock.run(round((self._end_s + TTFT_S) * 1e6))
        for request in (*self._group.running(), *self._group.waiting):
            self._judge(request, self._clock.now_s)
        return self._found

    def _words(self, tokens: int) -> Int32s:
        return simulated_model.random_ids(self._random, tokens)

    def _length(self, mean: int) -> int:
        return max(int(self._random.exponential(mean)), 1)

    def _begin(self) -> None:
        """A conversation, and the next one in a while."""
        self._clock.after(round(self._random.exponential(1e6 / self._traffic.conversations_per_s)), self._begin)
        system = self._systems[self._random.integers(len(self._systems))]
        self._turn(_Conversation(system, int(self._random.geometric(1 / self._traffic.turns))))

    def _turn(self, conversation: _Conversation) -> None:
        prompt = np.concatenate((conversation.ids, self._words(self._length(self._traffic.user_tokens))))
        most = LONGEST_ANSWER * self._traffic.answer_tokens
        if len(prompt) + most > self._setup.max_length:
            return  # it has become too long
        conversation.ids, conversation.turns = prompt, conversation.turns - 1
        self._submitted += 1
        self._conversations[self._submitted] = conversation
        message = simulated_model.submit(self._submitted, prompt, most)
        self._group.submit(to_request(message, 1, self._model, self._clock.now_s), self._clock.now_s)

    def _deliver(self, updated: list[Request], now: float) -> None:
        for request in updated:
            if request.end is None:
                continue
            self._judge(request, now)
            conversation = self._conversations.pop(request.key.request)
            conversation.ids = request.prefill_ids
            if conversation.turns:
                think_us = round(self._random.exponential(self._traffic.think_s * 1e6))
                self._clock.after(think_us, lambda conversation=conversation: self._turn(conversation))  # type: ignore[misc]

    def _judge(self, request: Request, now: float) -> None:
        """Those that have not ended by what they have."""
        times = latencies(request, now)
        if not self._warm_s <= request.arrived_at < self._end_s or times is None:
            return
        ttft_s, tpot_s = times
        self._found.ttft_s.append(ttft_s)
        self._found.good += ttft_s <= TTFT_S and tpot_s <= TPOT_S and request not in self._stuttered
