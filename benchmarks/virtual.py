"""Scheduler and simulated groups on a virtual clock: the real scheduling core and the simulated engine, without processes or waiting.

Everything between them is a delay each way. What computing the plans costs is not modelled: the core takes no virtual time.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from prometheus_client import CollectorRegistry

from services.scheduler.group import Group
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.requests import Request
from services.scheduler.steps import StepResult
from services.worker.engine.interface import LAUNCH_AHEAD
from services.worker.engine.simulated import SimulatedDevice, SimulatedStep
from services.worker.order import LaunchOrder
from shared.protocol.plan import Int32s, Plan, PlanFlag


class Clock:
    """Runs callbacks in the order of their times, in microseconds, ties in the order in which they were set."""

    def __init__(self) -> None:
        self.now_us = 0
        self._due: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = count()

    @property
    def now_s(self) -> float:
        return self.now_us / 1e6

    def after(self, delay_us: int, callback: Callable[[], object]) -> None:
        heapq.heappush(self._due, (self.now_us + delay_us, next(self._numbers), callback))

    def run(self, until_us: int) -> None:
        while self._due and self._due[0][0] <= until_us:
            self.now_us, _, callback = heapq.heappop(self._due)
            callback()
        self.now_us = until_us


@dataclass(eq=False)
class _Sent:
    plan: Plan
    slot_epochs: Int32s
    received_us: int
    step: SimulatedStep | None = None
    ids: list[Int32s] = field(default_factory=list)
    start_us: int = 0
    idle_us: int = 0


def metrics() -> SchedulerMetrics:
    """For a scheduler whose metrics nobody reads."""
    return SchedulerMetrics("simulated", vllm_names=False, registry=CollectorRegistry())


def latencies(request: Request, now: float) -> tuple[float, float] | None:
    """Seconds to the first token, and per token after it, of a request that has ended or is judged now; None: it has no token."""
    if request.first_token_at is None:
        return None
    after_s = now - request.first_token_at
    return request.first_token_at - request.arrived_at, after_s / max(len(request.output) - 1, 1)


class VirtualWorker:
    """A worker `delay_us` away from its scheduler's group, which is `group` once it is set; sends plans as a connection would."""

    def __init__(self, clock: Clock, device: SimulatedDevice, delay_us: int) -> None:
        self.group: Group
        self.busy_us = self.idle_us = 0  # the first from the start, the second since the first iteration
        self.plans = 0
        self._clock, self._device, self._delay_us = clock, device, delay_us
        self._order: LaunchOrder[_Sent] = LaunchOrder()
        self._launched: deque[_Sent] = deque()
        self._slot_epochs = np.zeros(device.limits.slots, dtype=np.int32)
        self._running = False
        self._free_at_us: int | None = None

    def send(self, plan: Plan) -> None:
        self.plans += 1
        self._clock.after(self._delay_us, lambda: self._receive(plan))

    def wake(self, after_s: float) -> None:
        self._clock.after(round(after_s * 1e6), lambda: self.group.on_time(self._clock.now_s))

    def _receive(self, plan: Plan) -> None:
        self._slot_epochs[plan.admissions["slot"]] = plan.admissions["epoch"]
        sent = _Sent(plan, self._slot_epochs[plan.row_slots], self._clock.now_us)
        self._order.add(sent, plan.iterations, jump=bool(plan.flags & PlanFlag.JUMP))
        self._launch()

    def _launch(self) -> None:
        while len(self._launched) < LAUNCH_AHEAD and (head := self._order.head()) is not None:
            self._launched.append(head)
            self._order.advance()
        if self._launched and not self._running:
            self._run(self._launched[0])

    def _run(self, sent: _Sent) -> None:
        now_us = self._clock.now_us
        idle_us = 0 if self._free_at_us is None else now_us - self._free_at_us
        if sent.step is None:
            sent.step, sent.start_us, sent.idle_us = self._device.begin(sent.plan), now_us, idle_us
        ids, step_us = sent.step.run()
        sent.ids.append(ids)
        self._running = True
        self.busy_us += step_us
        self.idle_us += idle_us
        self._clock.after(step_us, self._end)

    def _end(self) -> None:
        self._running, self._free_at_us = False, self._clock.now_us
        sent = self._launched.popleft()
        whole = len(sent.ids) == sent.plan.iterations
        self._launch()
        if whole:
            result = StepResult(
                plan_id=sent.plan.plan_id,
                ids=np.stack(sent.ids),
                slot_epochs=sent.slot_epochs,
                hold_us=self._clock.now_us - sent.received_us,
                start_us=sent.start_us,
                end_us=self._clock.now_us,
                idle_us=sent.idle_us,
            )
            self._clock.after(self._delay_us, lambda: self.group.on_result(result, self._clock.now_s))
