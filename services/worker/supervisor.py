"""The supervisor of a group: starts the ranks, puts plans and their iterations into one order, and ends everything when a rank fails.

It never touches the device. The order: each plan's bytes go into the ring once, then one RUN an iteration, at most LAUNCH_AHEAD
beyond the last finished one. `LaunchOrder` says whose iteration is next.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from services.worker.distributed.board import Board
from services.worker.distributed.rendezvous import Rendezvous
from services.worker.engine.interface import LAUNCH_AHEAD, Facts, RankSpec
from services.worker.messages import MAX_PACKET_BYTES, Done, Failed, Loading, Message, Ready, ResetDone, Scored, decode, socket_pair
from services.worker.metrics import GroupMetrics
from services.worker.order import LaunchOrder
from services.worker.rank import spec_to_json
from services.worker.ring import Kind, RingFull, RingWriter, create_ring
from services.worker.settings import WorkerSettings
from shared.errors import ConfigError, LockstepError
from shared.protocol.logprobs import NO_LOGPROBS, Logprobs
from shared.protocol.plan import Int32s, Limits, Plan, PlanFlag, check

logger = logging.getLogger(__name__)

# Of ranks, where the user has not set it otherwise. Threads that wait by spinning take the CPU from the threads that they wait for,
# when there are more processes than CPUs: a token of the demo model then took 675 ms instead of 160 (2 shared cores, 2 threads).
RANK_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_WAIT_POLICY": "PASSIVE"}
DEADLINE_FACTOR = 10  # a step may take this many times its estimate
WATCH_EVERY_S = 0.25
STACKS_S = 0.5  # for a stuck rank to print its stacks
CULPRIT_S = 2.0  # for the end of a rank that the others have noticed to be told


class GroupFailed(LockstepError):
    """A rank died, broke or stalled: the group ends."""


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


class _Rank:
    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self.process, self.link = process, link


class Ring(Protocol):
    """What the supervisor asks of the way to the ranks: see `RingWriter`."""

    def write(self, kind: Kind, plan: int, payload: bytes = b"") -> None: ...


class Supervisor:
    def __init__(self, settings: WorkerSettings, metrics: GroupMetrics) -> None:
        self.settings, self.metrics = settings, metrics
        self._enter("starting ranks", 0.0)
        self.facts: Facts | None = None
        self.limits: Limits | None = None
        self.slot_epochs = np.zeros(settings.max_num_seqs, dtype=np.int32)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready = asyncio.Event()
        self._ring: Ring
        self._ranks: list[_Rank] = []
        self._board: Board | None = None  # where ranks are processes
        self._lost_a_peer: set[int] = set()  # ranks that end since another one has
        self._facts: dict[int, Facts] = {}  # by rank, of those that are ready
        self._queue: LaunchOrder[_Queued] = LaunchOrder()
        self._launched: deque[_Queued] = deque()  # one entry an iteration in the ring, not yet finished
        self._head_since_s = time.monotonic()  # when the oldest launched iteration could start
        self._resets: dict[int, tuple[set[int], asyncio.Future[None]]] = {}
        self._reset_number = 0
        self._scratch = tempfile.TemporaryDirectory(prefix="lockstep-")
        self._watcher = asyncio.create_task(self._watch())
        metrics.watch(lambda: self.facts is not None, self._queue.__len__, lambda: [rank.process.pid for rank in self._ranks])

    # Start and end

    @property
    def num_ranks(self) -> int:
        """That answer a reset, each for itself."""
        return self.settings.tensor_parallel_size

    def start_ranks(self) -> None:
        """Starts one process a rank; `ready` waits for them."""
        settings, ranks = self.settings, self.num_ranks
        if settings.nodes > 1:
            raise ConfigError(f"nodes: {settings.nodes}: plans reach the ranks of one node only, so a group has one")
        rendezvous = Rendezvous.on_one_node(ranks, Path(self._scratch.name))
        self._board = board = Board(ranks)
        ring = create_ring()
        bells = [os.eventfd(0) for _ in range(ranks)]
        self._ring = RingWriter(ring, bells)
        for rank, bell in enumerate(bells):
            ours, theirs = socket_pair()
            spec = RankSpec(
                rank=rank,
                ranks=ranks,
                parent_pid=os.getpid(),
                engine=settings.engine,
                model=settings.model,
                script=settings.script,
                dtype=settings.dtype,
                max_model_len=settings.max_model_len,
                page_size=settings.page_size,
                num_pages=settings.num_pages,
                kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
                slots=settings.max_num_seqs,
                threads=settings.threads or max(1, len(os.sched_getaffinity(0)) // ranks),
                rendezvous=rendezvous.url,
                ring_fd=ring,
                bell_fd=bell,
                socket_fd=theirs.fileno(),
                board_fd=board.descriptor,
                device=settings.device,
                ranks_per_gpu=settings.ranks_per_gpu,
                memory_fraction=settings.memory_fraction,
                max_step_tokens=settings.max_step_tokens,
                cuda_graphs=settings.cuda_graphs,
                communicator=settings.communicator,
                start_timeout_s=settings.start_deadline_s,
                step_timeout_s=DEADLINE_FACTOR * settings.step_deadline_s,
                load_format=settings.load_format,
                sampling_gather=settings.sampling_gather,
                deterministic=settings.deterministic,
                profile_folder=settings.profile_folder,
                log_level=settings.log_level,
            )
            process = subprocess.Popen(
                [sys.executable, "-m", "services.worker.rank", spec_to_json(spec)],
                pass_fds=(ring, bell, theirs.fileno(), board.descriptor),
                env={**RANK_ENVIRONMENT, **os.environ},
            )
            theirs.close()
            ours.setblocking(False)
            self._ranks.append(_Rank(process, ours))
            asyncio.get_running_loop().add_reader(ours.fileno(), self._on_readable, rank)

    async def ready(self) -> None:
        """Returns once every rank is. Raises LockstepError when one fails, or after `start_deadline_s`."""
        waiting = asyncio.create_task(self._ready.wait())
        done, _ = await asyncio.wait((waiting, self.failed), timeout=self.settings.start_deadline_s, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self.failed in done:
            self.failed.result()
        if not done:
            reason = f"the ranks were not ready within start_deadline_s={self.settings.start_deadline_s:g}: {self.phase}"
            raise GroupFailed(reason + self._stalled())

    def stop(self) -> None:
        """Kills and reaps every rank: afterwards their devices are free."""
        self._watcher.cancel()
        for rank in self._ranks:
            asyncio.get_running_loop().remove_reader(rank.link.fileno())
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.link.close()
        self._scratch.cleanup()

    def overdue(self, grace_s: float = 0.0) -> str | None:
        """What the ranks should have finished `grace_s` ago, if anything; callable from any thread."""
        head = next(iter(self._launched.copy()), None)
        if head is None and not self._resets:
            return None
        limit_s = max(self.settings.step_deadline_s, DEADLINE_FACTOR * (head.plan.estimate_us / 1e6 if head else 0.0))
        if time.monotonic() - self._head_since_s <= limit_s + grace_s:
            return None
        what = f"plan {head.plan.plan_id}" if head else "a reset"
        return f"the ranks did not finish {what} within {limit_s:g} s" + self._stalled()

    def _stalled(self) -> str:
        """Who is behind, where ranks are processes."""
        return f": {self._board.stalled([rank.process.pid for rank in self._ranks])}" if self._board else ""

    def _enter(self, phase: str, progress: float) -> None:
        self.phase, self.progress = phase, progress
        self.metrics.phase(phase, progress)

    def _fail(self, error: LockstepError) -> None:
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
        self._resets[self._reset_number] = (set(range(self.num_ranks)), done)
        self._ring.write(Kind.RESET, self._reset_number)
        await asyncio.wait((done, self.failed), return_when=asyncio.FIRST_COMPLETED)
        if self.failed.done():
            self.failed.result()
        return int(self.slot_epochs.max(initial=0))

    def _launch(self) -> None:
        """Fills the ring, as far as there is work, room, and no more than LAUNCH_AHEAD iterations in it."""
        try:
            while len(self._launched) < LAUNCH_AHEAD and (head := self._queue.head()) is not None:
                if not head.written:
                    self._ring.write(Kind.PLAN, head.plan.plan_id, head.data)
                    head.written = True
                self._ring.write(Kind.RUN, head.plan.plan_id)
                if not self._launched:
                    self._head_since_s = time.monotonic()
                self._launched.append(head)
                self._queue.advance()
        except RingFull:
            logger.debug("the ring is full; room comes with the next result")

    # What the ranks say

    def _on_readable(self, rank: int) -> None:
        while True:
            try:
                packet = self._ranks[rank].link.recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._fail(GroupFailed(f"rank {rank}: {error}"))
                packet = b""
            if not packet:
                asyncio.get_running_loop().remove_reader(self._ranks[rank].link.fileno())
                if rank not in self._lost_a_peer:
                    self._fail(GroupFailed(f"rank {rank} ended {_describe(self._ranks[rank].process)}"))
                return
            self._on_message(rank, decode(packet))

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
                if rank == 0:
                    self._enter(phase, progress)
            case Failed(cause, config, peer):
                error = ConfigError(cause) if config else GroupFailed(f"rank {rank}: {cause}")
                if peer:  # who died tells more, but perhaps later
                    self._lost_a_peer.add(rank)
                    asyncio.get_running_loop().call_later(CULPRIT_S, self._fail, error)
                else:
                    self._fail(error)
            case Ready(facts, memory):
                self.metrics.memory(rank, memory)
                self._facts[rank] = facts
                self._become_ready()

    def _become_ready(self) -> None:
        if len(self._facts) < self.num_ranks:
            return
        facts = set(self._facts.values())
        if len(facts) > 1:
            self._fail(GroupFailed(f"the ranks disagree: {facts}"))
            return
        (self.facts,) = facts
        self.limits = self.limits_of(self.facts)
        self._enter("ready", 1.0)
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
            self._fail(GroupFailed(f"rank 0 finished plan {done.plan}, expected {queued.plan.plan_id}"))
            return
        queued.done.append(done)
        self._launch()
        self.metrics.iteration(done.end_us - done.start_us, done.idle_us, prefill=len(queued.plan.prefill_slots) > 0)
        if len(queued.done) == queued.plan.iterations:
            self.metrics.plan_done()
            if self._board is not None:
                self.metrics.rows_gathered(self._board.gathered_rows)
                self.metrics.iterations_replayed(self._board.replayed_iterations)
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
        """Ends the group when the oldest iteration is overdue, after its ranks have printed where they are."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if not self._launched and not self._resets:
                self._head_since_s = time.monotonic()
                continue
            reason = self.overdue()
            if reason is not None:
                for rank in self._ranks:
                    rank.process.send_signal(signal.SIGUSR1)
                await asyncio.sleep(STACKS_S)
                self._fail(GroupFailed(reason))
                return


def _describe(process: subprocess.Popen[bytes]) -> str:
    """How a process ended; its socket closes a moment before."""
    try:
        status = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return "its connection"
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"


def _now_us() -> int:
    return time.monotonic_ns() // 1000
