"""What scheduling costs: thread time of a result and the plan that follows it, and of the tree when it is large."""

import time
from collections import deque

import numpy as np
import pytest

from services.scheduler.group import Group
from services.scheduler.requests import Request
from services.scheduler.steps import StepResult
from shared.protocol.plan import Limits, Plan
from tests.services.scheduler.build import METRICS, make_request

pytestmark = pytest.mark.timed
REPEATS = 20  # of which the best counts: the machine is shared
PLANS = 60


class InstantWorker:
    """Answers plans with the same token for every row, at no cost worth measuring."""

    def __init__(self, rows: int, slots: int, pages: int) -> None:
        limits = Limits(slots=slots, pages=pages, page_size=16, max_length=4096, max_step_tokens=2 * rows + 512, vocab_size=1000)
        self.plans: deque[Plan] = deque()
        self.epochs = np.zeros(slots, dtype=np.int32)
        self.group = Group(
            "group", limits, 0, limits.max_step_tokens, True, self.plans.append, self.deliver, METRICS.engine("group"), bursts=False
        )
        self.submitted = 0
        for _ in range(rows):
            self.submit(1400)
        while sum(request is not None and bool(request.output) for request in self.group.slots.requests) < rows:
            self.step()

    def submit(self, max_tokens: int) -> None:
        self.submitted += 1
        prompt = [1 + self.submitted % 7, 1 + self.submitted // 7 % 7, *[3] * 20]
        self.group.submit(make_request(self.submitted, prompt, max_tokens, ignore_eos=True), 0.0)

    def deliver(self, updated: list[Request], now: float) -> None:
        """Nobody listens."""

    def step(self) -> int:
        """Nanoseconds of the scheduler's thread for the oldest result and what it leads to."""
        plan = self.plans.popleft()
        self.epochs[plan.admissions["slot"]] = plan.admissions["epoch"]
        ids = np.full((plan.iterations, plan.rows), 7, dtype=np.int32)
        result = StepResult(plan.plan_id, ids, self.epochs[plan.row_slots], hold_us=10_000, start_us=0, end_us=10_000, idle_us=0)
        began = time.thread_time_ns()
        self.group.on_result(result, 0.0)
        return time.thread_time_ns() - began


@pytest.mark.parametrize("rows", [1, 64, 256, 1024])
def test_a_plan_and_its_result_cost_little(rows: int) -> None:
    worker = InstantWorker(rows, slots=rows, pages=rows * 100 + 1)
    best_us = min(sum(worker.step() for _ in range(PLANS)) / PLANS / 1e3 for _ in range(REPEATS))
    print(f"{rows} rows: {best_us:.0f} us")
    assert worker.group.num_running == rows
    assert best_us <= 200 + rows


def test_requests_that_wait_for_pages_cost_little() -> None:
    """There are admissions, ends and preemptions, too."""
    worker = InstantWorker(64, slots=128, pages=256)  # at first 3 pages a request, and one more in 16 plans
    for _ in range(100):
        worker.submit(400)
    best_us = min(sum(worker.step() for _ in range(PLANS)) / PLANS / 1e3 for _ in range(REPEATS))
    print(f"{worker.group.num_running} rows, {len(worker.group.waiting)} requests that wait for pages: {best_us:.0f} us")
    assert worker.group.waiting.head() is not None
    assert best_us <= 200 + worker.group.num_running
