"""A crowd shares a step, and nobody else waits for it: the group with a simulated device, on a virtual clock."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from benchmarks.virtual import Clock, VirtualWorker
from services.scheduler.gathering import CROWD_S, MOST_S, TIMER_S, Gathering
from services.scheduler.group import Group
from services.scheduler.requests import Request
from services.worker.engine.roofline import GPUS, MODELS, Roofline
from services.worker.engine.simulated import Language, SimulatedDevice
from shared.protocol.plan import Limits, Plan, PlanFlag
from tests.services.scheduler.build import METRICS, make_request
from tests.services.scheduler.device import EOS

LIMITS = Limits(slots=264, pages=60_000, page_size=16, max_length=8_192, max_step_tokens=16_384, vocab_size=1_000)
PROMPT_TOKENS = 1_024


@dataclass
class Run:
    delay_us: int = 0
    model: str = "0.6b"
    plans: list[Plan] = field(default_factory=list)
    ttfts: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = Clock()
        device = SimulatedDevice(LIMITS, Language(LIMITS.vocab_size, (EOS,)), Roofline(GPUS["h200"], MODELS[self.model]))
        self.worker = VirtualWorker(self.clock, device, self.delay_us)
        self.random = np.random.default_rng(0)
        self.group = self.worker.group = Group(
            "group", LIMITS, 0, LIMITS.max_step_tokens, True, self.send, self.deliver, METRICS.engine("group"), wake=self.wake
        )

    def send(self, plan: Plan) -> None:
        self.plans.append(plan)
        self.worker.send(plan)

    def wake(self, after_s: float) -> None:
        """As coarse as an event loop's timers are."""
        after_us = round((after_s + self.random.uniform(-TIMER_S, TIMER_S)) * 1e6)
        self.clock.after(max(after_us, 0), lambda: self.group.on_time(self.clock.now_s))

    def deliver(self, updated: list[Request], now: float) -> None:
        for request in updated:
            if request.first_token_at is not None:
                self.ttfts.setdefault(request.key.request, request.first_token_at - request.arrived_at)

    def submit(self, number: int, max_tokens: int, prompt_tokens: int = PROMPT_TOKENS) -> None:
        prompt = [number] * (prompt_tokens - 1) + [1]
        self.group.submit(make_request(number, prompt, max_tokens, ignore_eos=True, arrived_at=self.clock.now_s), self.clock.now_s)

    def arrive(self, numbers: range, every_us: int, max_tokens: int, prompt_tokens: int = PROMPT_TOKENS) -> None:
        for place, number in enumerate(numbers):
            self.clock.after(place * every_us, lambda number=number: self.submit(number, max_tokens, prompt_tokens))  # type: ignore[misc]

    def after(self, seconds: float) -> None:
        self.clock.run(self.clock.now_us + round(seconds * 1e6))

    @property
    def prefills(self) -> list[int]:
        """Rows with a prompt, of each plan that has any."""
        return [len(plan.prefill_slots) for plan in self.plans if len(plan.prefill_slots)]


@pytest.mark.parametrize("delay_us", [0, 1_000, 5_000])
def test_a_crowd_at_an_idle_group_has_two_steps(delay_us: int) -> None:
    run = Run(delay_us)
    run.submit(500, 1)  # so that the group knows what a step takes
    run.after(0.1)
    run.plans.clear()
    run.arrive(range(16), 80, 1)
    run.after(1.0)
    assert sum(run.prefills) == 16
    assert len(run.prefills) == 2
    assert run.prefills[0] == 1  # the first has not waited
    assert run.ttfts[0] == pytest.approx(run.ttfts[500], abs=1e-4)


def test_together_they_have_one_step() -> None:
    run = Run()
    for number in range(16):
        run.group.submit(make_request(number, [number] * PROMPT_TOKENS, 1, ignore_eos=True), 0.0, followed=True)
    run.group.on_time(0.0)
    run.after(1.0)
    assert run.prefills == [16]


@pytest.mark.parametrize("delay_us", [0, 5_000])
def test_cached_prompts_that_come_fast_share_steps(delay_us: int) -> None:
    run = Run(delay_us)
    run.arrive(range(256), 0, 1)
    run.after(2.0)
    run.plans.clear()
    run.arrive(range(256), 100, 300)  # 26 ms
    run.after(0.3)
    assert sum(run.prefills) == 256
    assert len(run.prefills) <= 15


def test_a_lone_newcomer_never_waits() -> None:
    run = Run(1_000)
    run.arrive(range(32), 0, 4_000, 64)
    run.after(0.5)
    for number in range(100, 110):
        before = len(run.plans)
        run.submit(number, 4, 64)
        assert any(plan.flags & PlanFlag.JUMP for plan in run.plans[before:])
        run.after(0.03)


def test_a_crowd_keeps_no_device_idle() -> None:
    run = Run(1_000)
    run.arrive(range(32), 0, 4_000, 64)
    run.after(0.5)
    for first in (100, 300):
        run.plans.clear()
        idle_us, busy_us = run.worker.idle_us, run.worker.busy_us
        run.arrive(range(first, first + 100), 300, 20, 64)  # for 30 ms
        run.after(0.1)
    assert run.worker.idle_us - idle_us < 0.01 * (run.worker.busy_us - busy_us)  # now that it knows steps of these sizes
    assert sum(run.prefills) == 100
    assert len(run.prefills) < 30
    assert max(run.ttfts[number] for number in range(300, 400)) < 0.012


def test_the_first_of_a_crowd_waits_no_longer_than_the_most() -> None:
    gathering, now = Gathering(), 0.0
    gathering.on_sent(1_000_000, now)
    gathering.on_arrival(now, alone=True, step_us=0)
    assert not gathering.wait_s(now)
    waited_until = None
    for _ in range(20):
        now += CROWD_S / 2
        gathering.on_arrival(now, alone=waited_until is None, step_us=0)
        if not gathering.wait_s(now):
            break
        waited_until = now
    assert waited_until is not None
    assert MOST_S / 2 <= now <= CROWD_S + MOST_S


def test_newcomers_wait_only_while_there_is_work() -> None:
    gathering = Gathering()
    gathering.on_sent(2_000, 0.0)
    gathering.on_arrival(0.0, alone=True, step_us=0)
    gathering.on_arrival(0.0001, alone=True, step_us=0)
    assert gathering.wait_s(0.0001) == pytest.approx(CROWD_S)
    gathering.on_result(queued_us=0, round_trip_us=0, now=0.0002)
    assert not gathering.wait_s(0.0002)
