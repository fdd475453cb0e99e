"""Plans on their way through the ranks of a group: one order for their iterations, and each plan's result from what the ranks say.

Each plan's bytes go into the ring once, then one RUN an iteration, at most LAUNCH_AHEAD beyond the last finished one. `LaunchOrder` says
whose iteration is next.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.worker.engine.interface import LAUNCH_AHEAD
from services.worker.messages import Done
from services.worker.metrics import GroupMetrics
from services.worker.order import LaunchOrder
from services.worker.ranks import GroupFailed
from services.worker.ring import Kind, RingFull
from services.worker.settings import DEADLINE_FACTOR
from shared.errors import LockstepError
from shared.protocol.logprobs import NO_LOGPROBS, Logprobs
from shared.protocol.plan import Int32s, Plan, PlanFlag

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """All iterations of a plan are done. Times on this host's monotonic clock, in microseconds."""

    plan_id: int
    ids: Int32s  # [iterations, rows]
    slot_epochs: Int32s  # [rows]
    received_us: int
    start_us: int
    end_us: int
    idle_us: int
    logprobs: Logprobs  # of all iterations


@dataclass(eq=False)
class _Queued:
    plan: Plan
    data: bytes
    slot_epochs: Int32s
    received_us: int
    on_result: Callable[[Result], None]
    written: bool = False
    done: list[Done] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=lambda: [NO_LOGPROBS])

    def result(self) -> Result:
        first, last = self.done[0], self.done[-1]
        return Result(
            plan_id=self.plan.plan_id,
            ids=np.stack([each.ids for each in self.done]),
            slot_epochs=self.slot_epochs,
            received_us=self.received_us,
            start_us=first.start_us,
            end_us=last.end_us,
            idle_us=first.idle_us,
            logprobs=np.concatenate(self.logprobs),
        )


class Execution:
    def __init__(
        self, slots: int, write: Callable[[Kind, int, bytes], None], metrics: GroupMetrics, fail: Callable[[LockstepError], None]
    ) -> None:
        """write: an entry of the ring, as `Ranks.write`. fail: hears of what ends the group."""
        self._write, self._metrics, self._fail = write, metrics, fail
        self._slot_epochs = np.zeros(slots, dtype=np.int32)
        self._order: LaunchOrder[_Queued] = LaunchOrder()
        self._launched: deque[_Queued] = deque()  # one entry an iteration in the ring, not yet finished
        self._resets: dict[int, tuple[set[int], asyncio.Future[None]]] = {}  # by number: the ranks that have not executed it
        self._reset_number = 0
        self._head_since_s = time.monotonic()  # when the oldest launched iteration could start

    @property
    def queued(self) -> int:
        """Plans that are not launched in full; readable from any thread."""
        return len(self._order)

    @property
    def highest_slot_epoch(self) -> int:
        return int(self._slot_epochs.max(initial=0))

    def submit(self, plan: Plan, data: bytes, on_result: Callable[[Result], None]) -> None:
        """Takes a plan that was checked; `data` are its bytes."""
        self._slot_epochs[plan.admissions["slot"]] = plan.admissions["epoch"]
        queued = _Queued(plan, data, self._slot_epochs[plan.row_slots], time.monotonic_ns() // 1000, on_result)
        self._order.add(queued, plan.iterations, jump=bool(plan.flags & PlanFlag.JUMP))
        self._launch()

    def reset(self, ranks: set[int]) -> asyncio.Future[None]:
        """Drops what is queued and resets all slots, after what was launched -> done once all of these ranks have executed it."""
        self._order.clear()
        if not self._launched and not self._resets:
            self._head_since_s = time.monotonic()
        self._reset_number += 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._resets[self._reset_number] = (ranks, done)
        self._write(Kind.RESET, self._reset_number, b"")
        return done

    def overdue(self, deadline_s: float, grace_s: float) -> str | None:
        """What the ranks should have finished `grace_s` ago, if anything. deadline_s: of a step, at least. Callable from any thread."""
        head = next(iter(self._launched.copy()), None)
        if head is None and not self._resets:
            return None
        limit_s = max(deadline_s, DEADLINE_FACTOR * (head.plan.estimate_us / 1e6 if head else 0.0))
        if time.monotonic() - self._head_since_s <= limit_s + grace_s:
            return None
        return f"the ranks did not finish {f'plan {head.plan.plan_id}' if head else 'a reset'} within {limit_s:g} s"

    def on_reset_done(self, rank: int, number: int) -> None:
        """A rank has executed the reset of this number."""
        waiting, done = self._resets[number]
        waiting.discard(rank)
        if not waiting:
            del self._resets[number]
            if not done.done():
                done.set_result(None)

    def on_scored(self, records: Logprobs) -> None:
        """Log-probabilities of the iteration that is finished next."""
        self._launched[0].logprobs.append(records)

    def on_done(self, done: Done) -> bool:
        """The oldest launched iteration is finished. Returns whether its plan is, whose result has been told then."""
        queued = self._launched.popleft()
        self._head_since_s = time.monotonic()
        if queued.plan.plan_id != done.plan:
            self._fail(GroupFailed(f"rank 0 finished plan {done.plan}, expected {queued.plan.plan_id}"))
            return False
        queued.done.append(done)
        self._launch()
        self._metrics.iteration(done.end_us - done.start_us, done.idle_us, done.launch_us, prefill=len(queued.plan.prefill_slots) > 0)
        if len(queued.done) < queued.plan.iterations:
            return False
        self._metrics.plan_done()
        queued.on_result(queued.result())
        return True

    def _launch(self) -> None:
        """Fills the ring, as far as there is work, room, and no more than LAUNCH_AHEAD iterations in it."""
        try:
            while len(self._launched) < LAUNCH_AHEAD and (head := self._order.head()) is not None:
                if not head.written:
                    self._write(Kind.PLAN, head.plan.plan_id, head.data)
                    head.written = True
                self._write(Kind.RUN, head.plan.plan_id, b"")
                if not self._launched:
                    self._head_since_s = time.monotonic()
                self._launched.append(head)
                self._order.advance()
        except RingFull:
            logger.debug("the ring is full; room comes with the next result")
