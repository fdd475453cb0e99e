"""The lead rules as a whole, on a virtual clock: a distance costs the device nothing, and a newcomer a round trip."""

from dataclasses import dataclass, field
from statistics import median

import pytest

from benchmarks.virtual import Clock, VirtualWorker
from services.scheduler.group import Group
from services.scheduler.requests import Request
from services.worker.engine.roofline import GPUS, MODELS, Roofline
from services.worker.engine.simulated import Language, SimulatedDevice
from shared.protocol.plan import Limits, Plan, PlanFlag
from tests.services.scheduler.build import METRICS, make_request
from tests.services.scheduler.device import EOS

WARM_UP_S, SECONDS, PROBE_EVERY_S = 0.5, 1.5, 0.043
PROBE_TOKENS = 3
LANGUAGE = Language(1_000, (EOS,))


@dataclass
class Run:
    """Some rows decode all the time; newcomers with few tokens come and go."""

    model: str
    rows: int
    delay_us: int
    jump: bool = True
    bursts: bool = True
    overlap: bool = True
    plans: list[Plan] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = Limits(slots=self.rows + 8, pages=60_000, page_size=16, max_length=8_192, max_step_tokens=512, vocab_size=1_000)
        roofline = Roofline(GPUS["h200"], MODELS[self.model])
        self.clock = Clock()
        self.worker = VirtualWorker(self.clock, SimulatedDevice(limits, LANGUAGE, roofline), self.delay_us)
        self.step_us = roofline.step_us(self.rows, self.rows, 0, 0)
        self.submitted = 0
        self.held: list[Request] = []
        self.group = self.worker.group = Group(
            "group",
            limits,
            0,
            512,
            self.overlap,
            self.send,
            self.deliver,
            METRICS.engine("group"),
            self.bursts,
            self.jump,
            wake=self.worker.wake,
        )
        for _ in range(self.rows):
            self.held.append(self.submit(min(8_000, 900_000 // self.rows)))  # as many as the pages hold
        self.clock.run(round(WARM_UP_S * 1e6))
        busy, idle, start = self.worker.busy_us, self.worker.idle_us, len(self.plans)
        self.probe()
        self.clock.run(round((WARM_UP_S + SECONDS) * 1e6))
        busy, idle = self.worker.busy_us - busy, self.worker.idle_us - idle
        self.busy = busy / (busy + idle)
        self.plans = self.plans[start:]

    def send(self, plan: Plan) -> None:
        self.plans.append(plan)
        self.worker.send(plan)

    def submit(self, max_tokens: int) -> Request:
        self.submitted += 1
        request = make_request(self.submitted, [self.submitted] * 63 + [1], max_tokens, ignore_eos=True, arrived_at=self.clock.now_s)
        self.group.submit(request, self.clock.now_s)
        return request

    def probe(self) -> None:
        self.submit(PROBE_TOKENS)
        self.clock.after(round(PROBE_EVERY_S * 1e6), self.probe)

    def deliver(self, updated: list[Request], now: float) -> None:
        for request in updated:
            if request.max_tokens == PROBE_TOKENS and request.first_token_at == now:
                self.ttfts.append(now - request.arrived_at)
            if request.end is not None:
                prompt = request.prompt_ids.tolist()
                assert list(request.output) == LANGUAGE.completion(prompt, request.max_tokens, ignore_eos=True)


@pytest.mark.parametrize("model, rows", [("0.6b", 1), ("0.6b", 32), ("8b", 1), ("8b", 32)])
def test_distance_is_free(model: str, rows: int) -> None:
    near = Run(model, rows, 0)
    assert near.busy > 0.99
    for delay_us in (1_000, 5_000):
        far = Run(model, rows, delay_us)
        assert far.busy > 0.98 * near.busy
        assert len(far.ttfts) > 30
        assert median(far.ttfts) - median(near.ttfts) < 1.2 * 2 * delay_us / 1e6 + 2 * far.step_us / 1e6


def test_a_jump_saves_a_newcomer_the_queue() -> None:
    jumping, waiting = (median(Run("0.6b", 32, 5_000, jump=jump).ttfts) for jump in (True, False))
    assert jumping < 0.015
    assert waiting > jumping + 0.002


def test_bursts_save_plans_and_cost_a_newcomer_little() -> None:
    with_bursts, without = Run("0.6b", 1, 1_000), Run("0.6b", 1, 1_000, bursts=False)
    assert len(with_bursts.plans) < 0.6 * len(without.plans)
    assert median(with_bursts.ttfts) < median(without.ttfts) + 0.001


def test_without_overlap_each_step_waits_a_round_trip() -> None:
    run = Run("8b", 1, 5_000, overlap=False)
    assert run.busy == pytest.approx(run.step_us / (run.step_us + 10_000), rel=0.05)
    assert not any(plan.flags & PlanFlag.JUMP for plan in run.plans)
