"""What goes into the ring, and what comes of it, without any rank."""

import numpy as np
from prometheus_client import CollectorRegistry

from services.worker.execution import Execution, Result
from services.worker.messages import Done
from services.worker.metrics import WorkerMetrics
from services.worker.ring import Kind, RingFull
from shared.errors import LockstepError
from shared.protocol.plan import Plan


class Ring:
    """Notes what is written, as long as there is room."""

    def __init__(self) -> None:
        self.entries: list[tuple[Kind, int]] = []
        self.is_full = False
        self.results: list[Result] = []
        self.faults: list[LockstepError] = []
        self.execution = Execution(8, self.write, WorkerMetrics(CollectorRegistry()).group("group-0", 1), self.faults.append)

    def write(self, kind: Kind, plan: int, payload: bytes) -> None:
        if self.is_full:
            raise RingFull
        self.entries.append((kind, plan))

    def submit(self, plan_id: int, iterations: int = 1) -> None:
        slots = np.arange(2, dtype=np.int32)
        plan = Plan(plan_id, iterations=iterations, decode_slots=slots, decode_flags=slots)
        self.execution.submit(plan, b"", self.results.append)

    def done(self, plan_id: int, at_us: int = 10) -> bool:
        return self.execution.on_done(Done(plan_id, at_us, at_us + 5, 1, 1, np.array([at_us, 2], dtype=np.int32)))


def test_two_iterations_are_launched_ahead_and_a_burst_is_one_result() -> None:
    ring = Ring()
    ring.submit(1, iterations=3)
    ring.submit(2)
    assert ring.entries == [(Kind.PLAN, 1), (Kind.RUN, 1), (Kind.RUN, 1)]
    assert [ring.done(1, at_us) for at_us in (10, 20, 30)] == [False, False, True]
    assert ring.entries[3:] == [(Kind.RUN, 1), (Kind.PLAN, 2), (Kind.RUN, 2)]
    (result,) = ring.results
    assert (result.plan_id, result.start_us, result.end_us, result.ids.tolist()) == (1, 10, 35, [[10, 2], [20, 2], [30, 2]])


def test_a_plan_that_found_the_ring_full_is_written_with_the_next_result() -> None:
    ring = Ring()
    ring.submit(1)
    ring.is_full = True
    ring.submit(2)
    assert ring.execution.queued == 1
    ring.is_full = False
    assert ring.done(1)
    assert ring.entries == [(Kind.PLAN, 1), (Kind.RUN, 1), (Kind.PLAN, 2), (Kind.RUN, 2)]


def test_ranks_that_finish_another_plan_than_is_due_end_the_group() -> None:
    ring = Ring()
    ring.submit(1)
    assert not ring.done(2)
    assert str(ring.faults[0]) == "rank 0 finished plan 2, expected 1"
    assert not ring.results


async def test_a_reset_drops_what_is_queued_and_is_done_when_every_rank_has_executed_it() -> None:
    ring = Ring()
    ring.submit(1, iterations=5)
    reset = ring.execution.reset({0, 1})
    assert ring.execution.queued == 0
    ring.execution.on_reset_done(0, 1)
    assert not reset.done()
    ring.execution.on_reset_done(1, 1)
    assert reset.done()


async def test_what_is_overdue_is_named() -> None:
    ring = Ring()
    assert ring.execution.overdue(deadline_s=0, grace_s=-1) is None  # there is nothing to do
    ring.execution.reset({0})
    assert ring.execution.overdue(deadline_s=0, grace_s=-1) == "the ranks did not finish a reset within 0 s"
    ring.submit(7)
    assert ring.execution.overdue(deadline_s=0, grace_s=-1) == "the ranks did not finish plan 7 within 0 s"
    assert ring.execution.overdue(deadline_s=60, grace_s=0) is None
