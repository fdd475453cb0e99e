"""The supervisor of a group: starts the ranks, has them execute plans, and ends everything when a rank fails or stalls.

It never touches the device. Where a group spans nodes, this is the leader's supervisor, and all that its ranks get goes to the other
nodes too.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from services.worker.distributed.board import stalled
from services.worker.distributed.rendezvous import rank_name, ranks_of
from services.worker.distributed.sums import TESTING, hints
from services.worker.engine.interface import Facts
from services.worker.execution import Execution, Result
from services.worker.messages import Done, Ended, Failed, Loading, Message, Ready, ResetDone, Scored
from services.worker.metrics import GroupMetrics
from services.worker.ranks import GroupFailed, LocalRanks, Ranks, fault
from services.worker.remote import RemoteRanks
from services.worker.ring import Kind
from services.worker.settings import WorkerSettings
from services.worker.startup import FIRST, READY, Startup
from shared.errors import LockstepError
from shared.protocol.plan import Limits, Plan, check

logger = logging.getLogger(__name__)

WATCH_EVERY_S = 0.25
STACKS_S = 0.5  # for a stuck rank to print its stacks, and for the other nodes to say where theirs are
CULPRIT_S = 2.0  # for the end of a rank that the others have noticed to be told


class Supervisor:
    def __init__(self, settings: WorkerSettings, metrics: GroupMetrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.phase = ""
        self._enter(FIRST, 0.0)
        self._startup = Startup()
        self.facts: Facts | None = None
        self.limits: Limits | None = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready = asyncio.Event()
        self._local: LocalRanks | None = None  # where ranks are processes
        self.remote: list[RemoteRanks] = []  # of the other nodes
        self._parts: list[Ranks] = []  # all ranks, those of this node first
        self._lost_a_peer: set[int] = set()  # ranks that end since another one has
        self._facts: dict[int, Facts] = {}  # by rank, of those that are ready
        self._execution = Execution(settings.max_num_seqs, self._write, metrics, self.fail)
        self._watcher = asyncio.create_task(self._watch())
        metrics.watch(lambda: self.facts is not None, lambda: self._execution.queued, lambda: self._local.pids if self._local else {})

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
        reason = self._execution.overdue(self.settings.step_deadline_s, grace_s)
        return None if reason is None else reason + self._stalled()

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
        self._execution.submit(plan, data, on_result)

    async def reset(self) -> int:
        """Drops what is queued and resets all slots, after what was launched. Returns the highest slot epoch used so far."""
        done = self._execution.reset(self._numbers())
        await asyncio.wait((done, self.failed), return_when=asyncio.FIRST_COMPLETED)
        if self.failed.done():
            self.failed.result()
        return self._execution.highest_slot_epoch

    def _write(self, kind: Kind, plan: int, payload: bytes) -> None:
        for part in self._parts:  # the first alone may be full: then nobody gets the entry
            part.write(kind, plan, payload)

    # What the ranks say

    def _numbers(self) -> set[int]:
        return {rank for part in self._parts for rank in part.numbers}

    def _on_message(self, rank: int, message: Message) -> None:
        match message:
            case Done() as done:
                if self._execution.on_done(done) and self._local is not None:
                    self.metrics.rows_gathered(self._local.gathered_rows)
                    self.metrics.iterations_replayed(self._local.replayed_iterations)
            case Scored(_, records):
                self._execution.on_scored(records)
            case ResetDone(number):
                self._execution.on_reset_done(rank, number)
            case Loading(phase, progress):
                self._startup.advance(rank, phase, progress)
                self._enter(*self._startup.slowest)
            case Failed(peer=True):  # who died tells more, but perhaps later
                self._lost_a_peer.add(rank)
                asyncio.get_running_loop().call_later(CULPRIT_S, self.fail, fault(self._name(rank), message))
            case Failed():
                self.fail(fault(self._name(rank), message))
            case Ended() if rank not in self._lost_a_peer:
                self.fail(fault(self._name(rank), message))
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
        self._enter(READY, 1.0)
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

    async def _watch(self) -> None:
        """Ends the group when its first sums or the oldest iteration are overdue, after its ranks have printed where they are."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            reason = self.overdue()
            if reason is not None:
                for part in self._parts:
                    part.print_stacks()
                await asyncio.sleep(STACKS_S)
                self.fail(GroupFailed(self.overdue() or reason))
                return
