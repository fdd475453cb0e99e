"""The way to one worker: Describe until its groups are ready, then one Execute stream for each, anew whenever one breaks."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc

from services.scheduler.group import Group, longest_request
from services.scheduler.leadership import Leadership
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.model import Model
from services.scheduler.policy import PolicyName
from services.scheduler.scheduler import Scheduler
from services.scheduler.steps import StepResult
from shared.errors import LockstepError, ProtocolError
from shared.protocol import execution_pb2 as pb
from shared.protocol import files
from shared.protocol.execution_pb2_grpc import ExecutionStub
from shared.protocol.logprobs import logprobs_from_bytes
from shared.protocol.plan import Limits, Plan, encode, ids_from_bytes
from shared.rpc import PROTOCOL_VERSION, Outbox, StreamEnded, channel, check_version, received

logger = logging.getLogger(__name__)

FIRST_DELAY_S, LAST_DELAY_S = 0.1, 1.0  # between attempts to reach a worker
STABLE_S = 5.0  # a stream that lasted this long makes the next delay the first again
DESCRIBE_S = 5.0
FILES_S = 60.0
WELCOME_S = 30.0  # ranks end what they compute before they reset their slots
MAX_PAGE_TABLE = 1 << 28  # entries: slots x pages of a slot
MAX_PAGES = 1 << 24  # of a group: their books are made at once, 0.4 s for so many, and other groups wait meanwhile


class Worker:
    """Keeps a stream to every group of the worker at `target`; each is a `Group` of the scheduler while it lasts."""

    def __init__(
        self,
        target: str,
        scheduler: Scheduler,
        leadership: Leadership,
        metrics: SchedulerMetrics,
        max_step_tokens: int,
        overlap: bool,
        bursts: bool,
        jump: bool,
        policy: PolicyName,
        prefix_cache: bool,
        on_change: Callable[[], None],
        tls: Path | None = None,
        name: str | None = None,
    ) -> None:
        """on_change: called when a group has come or gone. tls and name: see `shared.rpc.channel`."""
        self._target, self._tls, self._name = target, tls, name
        self.leaving = False  # its pod is about to stop
        self.listed = True  # else its streams are its last ones
        self._groups: set[Group] = set()
        self._scheduler, self._leadership, self._metrics = scheduler, leadership, metrics
        self._max_step_tokens = max_step_tokens
        self._overlap, self._bursts, self._jump = overlap, bursts, jump
        self._policy: PolicyName = policy
        self._prefix_cache = prefix_cache
        self._on_change = on_change
        self._streams: dict[str, asyncio.Task[None]] = {}  # by group
        self._told: dict[str, str] = {}  # the last thing logged of the worker ("") and of each group

    async def run(self) -> None:
        """Until cancelled, or until the last stream of a worker that leaves, or is not listed any more, has ended."""
        delay_s = FIRST_DELAY_S
        try:
            while True:
                async with channel(self._target, self._tls, self._name) as opened:
                    stub = ExecutionStub(opened)
                    all_open = await self._open_streams(stub)
                    while self._streams:  # of a worker that is gone the next connection is a new one, with certificates read anew
                        if all_open:
                            opened_at = time.monotonic()
                            await asyncio.wait(self._streams.values(), return_when=asyncio.FIRST_COMPLETED)
                            if time.monotonic() - opened_at > STABLE_S:
                                delay_s = FIRST_DELAY_S
                        await asyncio.sleep(delay_s)
                        delay_s = min(delay_s * 1.5, LAST_DELAY_S)
                        all_open = await self._open_streams(stub)
                if self.leaving or not self.listed:
                    return
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 1.5, LAST_DELAY_S)
        finally:
            for task in self._streams.values():
                task.cancel()
            await asyncio.gather(*self._streams.values(), return_exceptions=True)

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
            with _grpc_errors():
                answer = await stub.Describe(pb.ExecutionDescribeRequest(protocol_version=PROTOCOL_VERSION), timeout=DESCRIBE_S)
            check_version(answer.protocol_version, "the worker")
        except LockstepError as error:
            self._tell("", str(error))
            return False
        self._told.pop("", None)
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
            limits = _limits(described)
            await self._learn_model(stub, described, limits)
            with _grpc_errors():
                await self._execute(stub, described, limits)
        except LockstepError as error:
            self._tell(described.name, str(error), logging.WARNING)
        except Exception:  # the edge: a defect costs this stream, not the scheduler
            logger.exception("worker %s, group %s: the stream failed", self._target, described.name)

    async def _learn_model(self, stub: ExecutionStub, described: pb.WorkerGroup, limits: Limits) -> None:
        """The first group says what the model is; raises ProtocolError when a later one serves another."""
        if self._scheduler.model is None:
            with _grpc_errors():
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
        outbox: Outbox[pb.ExecutionExecuteRequest] = Outbox(lambda: pb.ExecutionExecuteRequest(heartbeat=pb.ExecuteHeartbeat()))
        hello = pb.ExecuteHello(protocol_version=PROTOCOL_VERSION, group=described.name, epoch=epoch, stream=number)
        outbox.put(pb.ExecutionExecuteRequest(hello=hello))
        call = stub.Execute(aiter(outbox))
        group: Group | None = None
        try:
            welcome = await _welcome(call)

            def send(plan: Plan) -> None:
                outbox.put(pb.ExecutionExecuteRequest(plan=encode(plan)))

            def wake(after_s: float) -> None:
                asyncio.get_running_loop().call_later(after_s, on_time)

            def on_time() -> None:
                assert group is not None  # it has asked for this
                group.on_time(time.monotonic())

            group = Group(
                described.name,
                limits,
                welcome.highest_slot_epoch,
                self._max_step_tokens,
                self._overlap,
                send,
                self._scheduler.deliver,
                self._metrics.engine(described.name),
                self._bursts,
                self._jump,
                self._policy,
                self._prefix_cache,
                wake,
            )
            self._add(group, f"ready: {limits.slots} slots, {limits.pages} pages of {limits.page_size} tokens, stream {epoch}.{number}")
            async for message in received(aiter(call), "the worker"):
                self._on_message(message, group, (epoch, number))
                if group.draining and not group.load and not group.num_outstanding:
                    raise StreamEnded("drained: nothing is left there")
            raise StreamEnded("the worker ended the stream")
        finally:
            outbox.close()
            call.cancel()
            if group is not None:
                self._groups.discard(group)
                self._scheduler.remove_group(group, time.monotonic())
                self._on_change()

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

    def _on_message(self, message: pb.ExecutionExecuteResponse, group: Group, identity: tuple[int, int]) -> None:
        match message.WhichOneof("message"):
            case "result":
                if (message.result.epoch, message.result.stream) != identity:
                    raise ProtocolError(f"a result of stream {message.result.epoch}.{message.result.stream}")
                began_s = time.thread_time()
                group.on_result(_step_result(message.result), time.monotonic())
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


@contextlib.contextmanager
def _grpc_errors() -> Iterator[None]:
    """Failed and overdue calls become StreamEnded."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise StreamEnded(f"{error.code().name.lower()}: {error.details()}") from error
    except TimeoutError as error:
        raise StreamEnded("no answer in time") from error


async def _welcome(call: grpc.aio.StreamStreamCall[pb.ExecutionExecuteRequest, pb.ExecutionExecuteResponse]) -> pb.ExecuteWelcome:
    async for message in received(aiter(call), "the worker", WELCOME_S):
        match message.WhichOneof("message"):
            case "welcome":
                check_version(message.welcome.protocol_version, "the worker")
                return message.welcome
            case "heartbeat":
                continue
            case other:
                raise ProtocolError(f"an Execute stream does not begin with {other}")
    raise StreamEnded("the worker ended the stream")


def _limits(described: pb.WorkerGroup) -> Limits:
    """Raises ProtocolError when nothing could run within them, or the books would not fit into memory."""
    limits = Limits(
        slots=described.slots,
        pages=described.pages,
        page_size=described.page_size,
        max_length=described.max_length,
        max_step_tokens=described.max_step_tokens,
        vocab_size=described.vocab_size,
    )
    for name, least in (("slots", 1), ("pages", 2), ("page_size", 1), ("max_length", 2), ("max_step_tokens", 1), ("vocab_size", 1)):
        if not least <= getattr(limits, name) < 2**31:
            raise ProtocolError(f"refused: {name} is {getattr(limits, name)}")
    if limits.pages > MAX_PAGES:
        raise ProtocolError(f"refused: {limits.pages} pages are more than {MAX_PAGES}: give the worker a larger --page-size")
    if limits.slots * limits.pages_per_slot > MAX_PAGE_TABLE:
        raise ProtocolError(f"refused: {limits.slots} slots of {limits.pages_per_slot} pages are more than {MAX_PAGE_TABLE} entries")
    return limits


def _step_result(result: pb.PlanResult) -> StepResult:
    ids, slot_epochs = ids_from_bytes(result.ids), ids_from_bytes(result.slot_epochs)
    if not result.iterations or len(ids) != result.iterations * len(slot_epochs):
        raise ProtocolError(f"{len(ids)} ids are not {result.iterations} iterations of {len(slot_epochs)} rows")
    return StepResult(
        plan_id=result.plan,
        ids=ids.reshape(result.iterations, len(slot_epochs)),
        slot_epochs=slot_epochs,
        hold_us=result.hold_us,
        start_us=result.start_us,
        end_us=result.end_us,
        idle_us=result.idle_us,
        logprobs=logprobs_from_bytes(result.logprobs),
    )
