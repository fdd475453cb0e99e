"""The supervisor of a group: starts the ranks, puts plans and their iterations into one order, and ends everything when a rank fails.

It never touches the device. The order: each plan's bytes go into the ring once, then one RUN an iteration, at most LAUNCH_AHEAD
beyond the last finished one. `LaunchOrder` says whose iteration is next. Where a group spans nodes, this is the leader's supervisor, and
all entries go to the other nodes too.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.worker.distributed.board import stalled
from services.worker.distributed.rendezvous import rank_name, ranks_of
from services.worker.distributed.sums import TESTING, hints
from services.worker.engine.interface import LAUNCH_AHEAD, Facts
from services.worker.messages import Done, Ended, Failed, Loading, Message, Ready, ResetDone, Scored
from services.worker.metrics import GroupMetrics
from services.worker.order import LaunchOrder
from services.worker.ranks import GroupFailed, LocalRanks, Ranks, Startup
from services.worker.remote import RemoteRanks
from services.worker.ring import Kind, RingFull
from services.worker.settings import DEADLINE_FACTOR, WorkerSettings
from shared.errors import ConfigError, LockstepError
from shared.protocol.logprobs import NO_LOGPROBS, Logprobs
from shared.protocol.plan import Int32s, Limits, Plan, PlanFlag, check

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 0.25
STACKS_S = 0.5  # for a stuck rank to print its stacks, and for the other nodes to say where theirs are
CULPRIT_S = 2.0  # for the end of a rank that the others have noticed to be told


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


class Supervisor:
    def __init__(self, settings: WorkerSettings, metrics: GroupMetrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.phase = ""
        self._enter("starting ranks", 0.0)
        self._startup = Startup()
        self.facts: Facts | None = None
        self.limits: Limits | None = None
        self.slot_epochs = np.zeros(settings.max_num_seqs, dtype=np.int32)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready = asyncio.Event()
        self._local: LocalRanks | None = None  # where ranks are processes
        self.remote: list[RemoteRanks] = []  # of the other nodes
        self._parts: list[Ranks] = []  # all ranks, those of this node first
        self._lost_a_peer: set[int] = set()  # ranks that end since another one has
        self._facts: dict[int, Facts] = {}  # by rank, of those that are ready
        self._queue: LaunchOrder[_Queued] = LaunchOrder()
        self._launched: deque[_Queued] = deque()  # one entry an iteration in the ring, not yet finished
        self._head_since_s = time.monotonic()  # when the oldest launched iteration could start
        self._resets: dict[int, tuple[set[int], asyncio.Future[None]]] = {}
        self._reset_number = 0
        self._watcher = asyncio.create_task(self._watch())
        metrics.watch(lambda: self.facts is not None, self._queue.__len__, lambda: self._local.pids if self._local else {})

    # Start and end

    def start_ranks(self) -> None:
        """Starts those of this node, and expects the others'; `ready` waits for all."""
        settings = self.settings
        self._local = LocalRanks(settings, self._on_message)
        for rank in self._local.numbers:
            self._startup.advance(rank, self.phase, 0.0)
        for node in range(1, settings.nodes):
            numbers = ranks_of(node, settings.nodes, settings.tensor_parallel_size)
            self.remote.append(RemoteRanks(node, numbers, self._on_message, self.fail))
            for rank in numbers:
                self._startup.expect(rank, f"waiting for node {node}")
        self._parts = [self._local, *self.remote]
        self._enter(*self._startup.slowest)

    async def ready(self) -> None:
        """Returns once every rank is. Raises LockstepError when one fails, or after `start_deadline_s`."""
        waiting = asyncio.create_task(self._ready.wait())
        done, _ = await asyncio.wait((waiting, self.failed), timeout=self.settings.start_deadline_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not done:
            reason = f"the ranks were not ready within start_deadline_s={self.settings.start_deadline_s:g}: {self.phase}"
            self.fail(GroupFailed(reason + self._stalled()))
        if self.failed.done():
            self.failed.result()

    def stop(self) -> None:
        """Kills and reaps every rank of this node: afterwards their devices are free."""
        self._watcher.cancel()
        for part in self._parts:
            part.stop()

    def overdue(self, grace_s: float = 0.0) -> str | None:
        """What the ranks should have finished `grace_s` ago, if anything; callable from any thread."""
        if self.phase.startswith(TESTING):
            return self._preflight_overdue(grace_s)
        head = next(iter(self._launched.copy()), None)
        if head is None and not self._resets:
            return None
        limit_s = max(self.settings.step_deadline_s, DEADLINE_FACTOR * (head.plan.estimate_us / 1e6 if head else 0.0))
        if time.monotonic() - self._head_since_s <= limit_s + grace_s:
            return None
        what = f"plan {head.plan.plan_id}" if head else "a reset"
        return f"the ranks did not finish {what} within {limit_s:g} s" + self._stalled()

    def _preflight_overdue(self, grace_s: float) -> str | None:
        limit_s = self.settings.preflight_deadline_s
        if time.monotonic() - self._phase_since_s <= limit_s + grace_s:
            return None
        return f"{self.phase} did not end within preflight_deadline_s={limit_s:g}{self._stalled()}: {hints(self.phase)}"

    def _stalled(self) -> str:
        """Who is behind, where ranks are processes."""
        standings = [standing for part in self._parts for standing in part.standings()]
        return f": {stalled(standings, self._name)}" if standings else ""

    def _name(self, rank: int) -> str:
        return rank_name(rank, self.settings.nodes, self.settings.tensor_parallel_size)

    def _enter(self, phase: str, progress: float) -> None:
        if phase != self.phase:
            self._phase_since_s = time.monotonic()
        self.phase, self.progress = phase, progress
        self.metrics.phase(phase, progress)

    def fail(self, error: LockstepError) -> None:
        """The group ends, for the first cause that is told."""
        if not self.failed.done():
            self.failed.set_exception(error)

    # Plans

    def submit(self, plan: Plan, data: bytes, on_result: Callable[[Result], None]) -> None:
        """Takes a plan for execution; `data` are its bytes. Raises PlanError when it must not be executed."""
        assert self.limits is not None, "no plan comes before the group is ready"
        check(plan, self.limits)
        self.slot_epochs[plan.admissions["slot"]] = plan.admissions["epoch"]
        queued = _Queued(plan, data, self.slot_epochs[plan.row_slots], _now_us(), on_result)
        self._queue.add(queued, plan.iterations, jump=bool(plan.flags & PlanFlag.JUMP))
        self._launch()

    async def reset(self) -> int:
        """Drops what is queued and resets all slots, after what was launched. Returns the highest slot epoch used so far."""
        self._queue.clear()
        self._reset_number += 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._resets[self._reset_number] = (self._numbers(), done)
        self._write(Kind.RESET, self._reset_number)
        await asyncio.wait((done, self.failed), return_when=asyncio.FIRST_COMPLETED)
        if self.failed.done():
            self.failed.result()
        return int(self.slot_epochs.max(initial=0))

    def _launch(self) -> None:
        """Fills the ring, as far as there is work, room, and no more than LAUNCH_AHEAD iterations in it."""
        try:
            while len(self._launched) < LAUNCH_AHEAD and (head := self._queue.head()) is not None:
                if not head.written:
                    self._write(Kind.PLAN, head.plan.plan_id, head.data)
                    head.written = True
                self._write(Kind.RUN, head.plan.plan_id)
                if not self._launched:
                    self._head_since_s = time.monotonic()
                self._launched.append(head)
                self._queue.advance()
        except RingFull:
            logger.debug("the ring is full; room comes with the next result")

    def _write(self, kind: Kind, plan: int, payload: bytes = b"") -> None:
        for part in self._parts:  # the first alone may be full: then nobody gets the entry
            part.write(kind, plan, payload)

    # What the ranks say

    def _numbers(self) -> set[int]:
        return {rank for part in self._parts for rank in part.numbers}

    def _on_message(self, rank: int, message: Message) -> None:
        match message:
            case Done() as done:
                self._on_done(done)
            case Scored(_, records):
                self._launched[0].logprobs.append(records)
            case ResetDone(number):
                waiting, future = self._resets[number]
                waiting.discard(rank)
                if not waiting:
                    del self._resets[number]
                    if not future.done():
                        future.set_result(None)
            case Loading(phase, progress):
                self._startup.advance(rank, phase, progress)
                self._enter(*self._startup.slowest)
            case Ended(how):
                if rank not in self._lost_a_peer:
                    self.fail(GroupFailed(f"rank {self._name(rank)} ended {how}"))
            case Failed(cause, config, peer):
                error = ConfigError(cause) if config else GroupFailed(f"rank {self._name(rank)}: {cause}")
                if peer:  # who died tells more, but perhaps later
                    self._lost_a_peer.add(rank)
                    asyncio.get_running_loop().call_later(CULPRIT_S, self.fail, error)
                else:
                    self.fail(error)
            case Ready(facts, memory, sums):
                self.metrics.memory(rank, memory)
                if rank == 0:  # all measure the same
                    self.metrics.sums(sums)
                    self.metrics.shapes_borrowed(facts.borrowed_shapes)
                self._facts[rank] = facts
                self._become_ready()

    def _become_ready(self) -> None:
        if self._facts.keys() != self._numbers():
            return
        facts = set(self._facts.values())
        if len(facts) > 1:
            self.fail(GroupFailed(f"the ranks disagree: {facts}"))
            return
        (self.facts,) = facts
        self.limits = self.limits_of(self.facts)
        self._enter("ready", 1.0)
        seconds = self.metrics.startup_seconds
        logger.info("ready in %.1f s: %s", sum(seconds.values()), ", ".join(f"{phase} {each:.2f}" for phase, each in seconds.items()))
        self._ready.set()

    def limits_of(self, facts: Facts) -> Limits:
        settings = self.settings
        return Limits(
            slots=settings.max_num_seqs,
            pages=facts.pages,
            page_size=settings.page_size,
            max_length=facts.max_length,
            max_step_tokens=settings.max_step_tokens,
            vocab_size=facts.vocab_size,
        )

    def _on_done(self, done: Done) -> None:
        queued = self._launched.popleft()
        self._head_since_s = time.monotonic()
        if queued.plan.plan_id != done.plan:
            self.fail(GroupFailed(f"rank 0 finished plan {done.plan}, expected {queued.plan.plan_id}"))
            return
        queued.done.append(done)
        self._launch()
        self.metrics.iteration(done.end_us - done.start_us, done.idle_us, done.launch_us, prefill=len(queued.plan.prefill_slots) > 0)
        if len(queued.done) == queued.plan.iterations:
            self.metrics.plan_done()
            if self._local is not None:
                self.metrics.rows_gathered(self._local.gathered_rows)
                self.metrics.iterations_replayed(self._local.replayed_iterations)
            queued.on_result(
                Result(
                    plan_id=done.plan,
                    ids=np.stack([each.ids for each in queued.done]),
                    slot_epochs=queued.slot_epochs,
                    received_us=queued.received_us,
                    start_us=queued.done[0].start_us,
                    end_us=done.end_us,
                    idle_us=queued.done[0].idle_us,
                    logprobs=np.concatenate(queued.logprobs),
                )
            )

    async def _watch(self) -> None:
        """Ends the group when its first sums or the oldest iteration are overdue, after its ranks have printed where they are."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if not self._launched and not self._resets:
                self._head_since_s = time.monotonic()
            reason = self.overdue()
            if reason is not None:
                for part in self._parts:
                    part.print_stacks()
                await asyncio.sleep(STACKS_S)
                self.fail(GroupFailed(self.overdue() or reason))
                return


def _now_us() -> int:
    return time.monotonic_ns() // 1000
