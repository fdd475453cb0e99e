"""The way to one worker: Describe until its groups are ready, then one Execute stream for each, anew whenever one breaks."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from services.scheduler.group import Group, longest_request
from services.scheduler.health import Health
from services.scheduler.leadership import Leadership
from services.scheduler.model import Model
from services.scheduler.scheduler import Scheduler
from services.scheduler.stream import ExecuteStream, grpc_errors, limits_of, step_result
from shared.errors import ConfigError, LockstepError, ProtocolError
from shared.protocol import execution_pb2 as pb
from shared.protocol import files
from shared.protocol.execution_pb2_grpc import ExecutionStub
from shared.protocol.plan import Limits, Plan
from shared.rpc import PROTOCOL_VERSION, StreamEnded, channel, check_version

logger = logging.getLogger(__name__)

FIRST_DELAY_S, LAST_DELAY_S = 0.1, 1.0  # between attempts to reach a worker
STABLE_S = 5.0  # a stream that lasted this long makes the next delay the first again
DESCRIBE_S = 5.0
FILES_S = 60.0
MAX_GROUPS = 1024  # of a worker
OVERDUE_FACTOR = 12  # estimates of a plan: the worker itself allows 10, and then says what hangs

# (name, limits, highest slot epoch, send, wake, health)
MakeGroup = Callable[[str, Limits, int, Callable[[Plan], None], Callable[[float], None], Health], Group]


class GivenUp(StreamEnded):
    """It is we who end the stream."""


class Overdue(GivenUp):
    """The worker lives, and answers no plan."""


class Worker:
    """Keeps a stream to every group of the worker at `target`; each is a `Group` of the scheduler while it lasts."""

    def __init__(
        self,
        target: str,
        scheduler: Scheduler,
        leadership: Leadership,
        make_group: MakeGroup,
        plan_deadline_s: float,
        on_change: Callable[[], None],
        tls: Path | None = None,
        name: str | None = None,
    ) -> None:
        """plan_deadline_s: see the settings. on_change: called when a group has come or gone. tls and name: see `shared.rpc.channel`."""
        self._target, self._tls, self._name = target, tls, name
        self.leaving = False  # its pod is about to stop
        self.listed = True  # else its streams are its last ones
        self._groups: set[Group] = set()
        self._health: dict[str, Health] = {}  # by group, whatever becomes of its streams
        self._scheduler, self._leadership, self._make_group = scheduler, leadership, make_group
        self._plan_deadline_s = plan_deadline_s
        self._delay_s = FIRST_DELAY_S
        self._on_change = on_change
        self._streams: dict[str, asyncio.Task[None]] = {}  # by group
        self._told: dict[str, str] = {}  # the last thing logged of the worker ("") and of each group

    async def run(self) -> None:
        """Until cancelled, or until the last stream of a worker that leaves, or is not listed any more, has ended."""
        try:
            while True:
                try:
                    async with channel(self._target, self._tls, self._name) as opened:
                        await self._keep_streams(ExecutionStub(opened))
                except ConfigError as error:  # certificates that are being renewed: streams to other workers go on
                    self._tell("", str(error), logging.WARNING)
                if self.leaving or not self.listed:
                    return
                await self._pause()
        finally:
            for task in self._streams.values():
                task.cancel()
            await asyncio.gather(*self._streams.values(), return_exceptions=True)

    async def _keep_streams(self, stub: ExecutionStub) -> None:
        """Until there is none: of a worker that is gone the next connection is a new one, with certificates read anew."""
        all_open = await self._open_streams(stub)
        while self._streams:
            if all_open:
                opened_at = time.monotonic()
                await asyncio.wait(self._streams.values(), return_when=asyncio.FIRST_COMPLETED)
                if time.monotonic() - opened_at > STABLE_S:
                    self._delay_s = FIRST_DELAY_S
            await self._pause()
            all_open = await self._open_streams(stub)

    async def _pause(self) -> None:
        """Before the next attempt, each time longer."""
        await asyncio.sleep(self._delay_s)
        self._delay_s = min(self._delay_s * 1.5, LAST_DELAY_S)

    def leave(self) -> None:
        """Its pod is about to stop: no new requests, and those that it has move where there is room."""
        if not self.leaving:
            self.leaving = True
            self._tell("", "about to stop")
            for group in self._groups:
                self._scheduler.drain_group(group, time.monotonic())
            self._on_change()

    async def _open_streams(self, stub: ExecutionStub) -> bool:
        """Opens a stream to each group that is ready and has none. Returns whether every group has one."""
        self._streams = {name: task for name, task in self._streams.items() if not task.done()}
        if self.leaving or not self.listed:
            return False
        try:
            with grpc_errors():
                answer = await stub.Describe(pb.ExecutionDescribeRequest(protocol_version=PROTOCOL_VERSION), timeout=DESCRIBE_S)
            check_version(answer.protocol_version, "the worker")
            if len(answer.groups) > MAX_GROUPS:
                raise ProtocolError(f"refused: {len(answer.groups)} groups are more than {MAX_GROUPS}")
        except LockstepError as error:
            self._tell("", str(error))
            return False
        names = {described.name for described in answer.groups}
        for known in (self._told, self._health):
            for name in known.keys() - names - self._streams.keys():
                del known[name]
        for described in answer.groups:
            if described.name in self._streams:
                continue
            if described.ready:
                self._streams[described.name] = asyncio.create_task(self._keep(stub, described))
            else:
                self._tell(described.name, f"not ready: {described.phase}")
        return bool(answer.groups) and len(self._streams) == len(answer.groups)

    async def _keep(self, stub: ExecutionStub, described: pb.WorkerGroup) -> None:
        """One stream, until it breaks."""
        try:
            limits = limits_of(described)
            await self._learn_model(stub, described, limits)
            with grpc_errors():
                await self._execute(stub, described, limits)
        except LockstepError as error:
            self._tell(described.name, str(error), logging.WARNING)
        except Exception:  # the edge: a defect costs this stream, not the scheduler
            logger.exception("worker %s, group %s: the stream failed", self._target, described.name)

    async def _learn_model(self, stub: ExecutionStub, described: pb.WorkerGroup, limits: Limits) -> None:
        """The first group says what the model is; raises ProtocolError when a later one serves another."""
        if self._scheduler.model is None:
            with grpc_errors():
                async with asyncio.timeout(FILES_S):
                    model_files = await files.receive(aiter(stub.Files(pb.ExecutionFilesRequest(group=described.name))))
            if self._scheduler.model is None:  # no other group was faster
                self._scheduler.model = Model(
                    fingerprint=described.fingerprint,
                    vocab_size=limits.vocab_size,
                    max_length=longest_request(limits),
                    eos_ids=frozenset(described.eos_ids),
                    files=tuple(model_files),
                )
        model = self._scheduler.model
        if described.fingerprint != model.fingerprint:
            raise ProtocolError(f"refused: it serves the model {described.fingerprint or '(none)'}, the first group {model.fingerprint}")

    async def _execute(self, stub: ExecutionStub, described: pb.WorkerGroup, limits: Limits) -> None:
        epoch, number = await self._leadership.next_stream(described.highest_epoch, described.highest_stream)
        async with ExecuteStream(stub, described.name, epoch, number) as stream:

            def wake(after_s: float) -> None:
                asyncio.get_running_loop().call_later(after_s, lambda: group.on_time(time.monotonic()))

            health = self._health.setdefault(described.name, Health())
            group = self._make_group(described.name, limits, stream.highest_slot_epoch, stream.send, wake, health)
            ours: LockstepError | None = None  # the reason, where it is we who end the stream
            try:
                self._add(group, f"ready: {limits.slots} slots, {limits.pages} pages of {limits.page_size} tokens, stream {epoch}.{number}")
                await self._work(stream, group)
            except (GivenUp, ProtocolError) as error:
                ours = error
                raise
            finally:
                self._groups.discard(group)
                self._scheduler.remove_group(group, time.monotonic(), overdue=isinstance(ours, Overdue))
                self._on_change()
                if ours is not None:
                    await stream.goodbye(str(ours))

    async def _work(self, stream: ExecuteStream, group: Group) -> None:
        """Until the stream ends, or should. A worker that lives is heard of twice a second, whatever it computes."""
        result_at = time.monotonic()
        async for message in stream.messages():
            now = time.monotonic()
            if message.WhichOneof("message") == "result":
                result_at = now
            self._on_message(message, group)
            if group.draining and not group.load and not group.num_outstanding:
                raise GivenUp("drained: nothing is left there")
            oldest = group.oldest
            if oldest is not None:
                waits_s = now - max(oldest.sent_at, result_at)
                if waits_s > max(self._plan_deadline_s, OVERDUE_FACTOR * oldest.estimate_us / 1e6):
                    raise Overdue(f"given up: no result of plan {group.passed + 1} for {waits_s:.1f} s, and heartbeats go on")

    def _add(self, group: Group, what: str) -> None:
        model = self._scheduler.model
        assert model is not None  # learnt before
        self._scheduler.model = replace(model, max_length=max(model.max_length, group.max_length))
        self._scheduler.add_group(group, time.monotonic())
        self._groups.add(group)
        self._tell(group.name, what)
        if self.leaving:  # it was about to stop while the stream was being opened
            self._scheduler.drain_group(group, time.monotonic())
        self._on_change()

    def _on_message(self, message: pb.ExecutionExecuteResponse, group: Group) -> None:
        match message.WhichOneof("message"):
            case "result":
                began_s = time.thread_time()
                self._scheduler.on_result(group, step_result(message.result), time.monotonic())
                group.metrics.planned(time.thread_time() - began_s)
            case "draining":
                self._tell(group.name, f"draining, {message.draining.remaining_ms} ms are left")
                self._scheduler.drain_group(group, time.monotonic())
                self._on_change()
            case "heartbeat":
                pass
            case other:
                raise ProtocolError(f"an Execute stream does not go on with {other}")

    def _tell(self, group: str, what: str, level: int = logging.INFO) -> None:
        """Logs what has changed; a worker that stays away is told of once."""
        if self._told.get(group) != what:
            self._told[group] = what
            logger.log(level, "worker %s%s: %s", self._target, f", group {group}" if group else "", what)
