"""The worker's gRPC side: who may send plans to its groups, and what it is told."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import grpc

from services.worker.execution import Result
from services.worker.ranks import GroupFailed
from services.worker.supervisor import Supervisor
from services.worker.weights.folder import ModelFolder
from shared.errors import LockstepError, ProtocolError
from shared.protocol import execution_pb2 as pb
from shared.protocol.execution_pb2_grpc import ExecutionServicer
from shared.protocol.files import messages
from shared.protocol.plan import PlanError, decode, ids_to_bytes
from shared.rpc import CONNECT_S, PROTOCOL_VERSION, Context, Outbox, StreamEnded, check_version, received

logger = logging.getLogger(__name__)

Requests = AsyncIterator[pb.ExecutionExecuteRequest]

GONE = "the scheduler has gone"
MAX_REASON = 500  # characters that are logged
DRAINED_EVERY_S = 0.02
MAX_REMAINING_MS = 2**32 - 1  # that a message can tell: seven weeks


class Fenced(LockstepError):
    """A newer stream has taken the group over."""


class ExecuteStream:
    """One scheduler's hold on the group: the newest hello has it."""

    def __init__(self, epoch: int, number: int) -> None:
        self.epoch, self.number = epoch, number
        self._told = False
        self.outbox: Outbox[pb.ExecutionExecuteResponse] = Outbox(lambda: pb.ExecutionExecuteResponse(heartbeat=pb.ExecuteHeartbeat()))

    def tell_end(self, cause: str) -> None:
        """Logs how the stream ended, once: several tasks may notice it."""
        if not self._told:
            self._told = True
            logger.warning("stream %d.%d: %s", self.epoch, self.number, cause)

    def on_result(self, result: Result) -> None:
        now_us = time.monotonic_ns() // 1000
        self.outbox.put(
            pb.ExecutionExecuteResponse(
                result=pb.PlanResult(
                    plan=result.plan_id,
                    epoch=self.epoch,
                    stream=self.number,
                    iterations=len(result.ids),
                    ids=ids_to_bytes(result.ids),
                    slot_epochs=ids_to_bytes(result.slot_epochs),
                    hold_us=now_us - result.received_us,
                    start_us=result.start_us,
                    end_us=result.end_us,
                    idle_us=result.idle_us,
                    logprobs=result.logprobs.tobytes(),
                )
            )
        )


class ServedGroup:
    """A group and the stream that has it."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.current: ExecuteStream | None = None
        self.highest = (0, 0)  # (epoch, stream) of all hellos taken
        self.draining = False
        self.supervise(supervisor)

    def supervise(self, supervisor: Supervisor) -> None:
        """The group starts anew."""
        self.supervisor = supervisor
        supervisor.failed.add_done_callback(self._on_failure)

    def describe(self, fingerprint: str) -> pb.WorkerGroup:
        supervisor, settings = self.supervisor, self.supervisor.settings
        group = pb.WorkerGroup(
            name=settings.group,
            ready=supervisor.facts is not None and not supervisor.failed.done() and not self.draining,
            phase="draining" if self.draining else supervisor.phase,
            progress=supervisor.progress,
            fingerprint=fingerprint,
            tp=settings.tensor_parallel_size,
            page_size=settings.page_size,
            slots=settings.max_num_seqs,
            max_step_tokens=settings.max_step_tokens,
            highest_epoch=self.highest[0],
            highest_stream=self.highest[1],
        )
        if supervisor.facts is not None:
            group.pages = supervisor.facts.pages
            group.max_length = supervisor.facts.max_length
            group.vocab_size = supervisor.facts.vocab_size
            group.eos_ids.extend(supervisor.facts.eos_ids)
        return group

    def drain(self, remaining_ms: int) -> None:
        """No scheduler can take the group any more; the one that has it is told to move its requests or end them."""
        self.draining = True
        if self.current is not None:
            self.current.outbox.put(pb.ExecutionExecuteResponse(draining=pb.Draining(remaining_ms=remaining_ms)))

    def _on_failure(self, failed: asyncio.Future[None]) -> None:
        """Lets the scheduler know the cause, not only that the connection broke."""
        error = failed.exception()
        if self.current is not None and isinstance(error, LockstepError):
            self.current.outbox.close(error)


class ExecutionService(ExecutionServicer):
    def __init__(self, groups: list[ServedGroup], folder: ModelFolder, fingerprint: str) -> None:
        self.groups = {group.supervisor.settings.group: group for group in groups}
        self.folder, self.fingerprint = folder, fingerprint

    async def Describe(self, request: pb.ExecutionDescribeRequest, context: Context) -> pb.ExecutionDescribeResponse:
        await _checked_version(request.protocol_version, context)
        groups = [group.describe(self.fingerprint) for group in self.groups.values()]
        return pb.ExecutionDescribeResponse(protocol_version=PROTOCOL_VERSION, groups=groups)

    async def Files(self, request: pb.ExecutionFilesRequest, context: Context) -> AsyncIterator[pb.ExecutionFilesResponse]:
        await self._group(request.group, context)
        for message in messages(self.folder.text_files, pb.ExecutionFilesResponse):
            yield message

    async def Execute(self, requests: Requests, context: Context) -> AsyncIterator[pb.ExecutionExecuteResponse]:
        incoming = received(requests, "the scheduler")
        hello, group = await self._hello(incoming, context)
        stream = await self._take_over(hello, group, context)
        supervisor = group.supervisor
        reader: asyncio.Task[None] | None = None
        try:
            highest_slot_epoch = await supervisor.reset()
            supervisor.metrics.stream_taken()
            logger.info("stream %d.%d: a scheduler has taken over", stream.epoch, stream.number)
            welcome = pb.ExecuteWelcome(protocol_version=PROTOCOL_VERSION, highest_slot_epoch=highest_slot_epoch)
            stream.outbox.put(pb.ExecutionExecuteResponse(welcome=welcome))
            reader = asyncio.create_task(self._read(incoming, group, supervisor, stream))
            async for message in stream.outbox:
                yield message
        except PlanError as error:
            supervisor.metrics.plan_refused()
            logger.error("stream %d.%d: plan refused: %s", stream.epoch, stream.number, error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Fenced as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        except GroupFailed as error:  # `main` tells it
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except LockstepError as error:
            stream.tell_end(str(error))
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except asyncio.CancelledError:  # by grpc, when the connection breaks
            stream.tell_end(GONE)
            raise
        finally:
            if reader is not None:
                reader.cancel()
            if group.current is stream:
                group.current = None

    async def _hello(self, incoming: Requests, context: Context) -> tuple[pb.ExecuteHello, ServedGroup]:
        try:
            async with asyncio.timeout(CONNECT_S):
                first = await anext(incoming, pb.ExecutionExecuteRequest())
        except (TimeoutError, StreamEnded):
            first = pb.ExecutionExecuteRequest()
        if first.WhichOneof("message") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of an Execute stream is its hello")
        await _checked_version(first.hello.protocol_version, context)
        group = await self._group(first.hello.group, context)
        if group.supervisor.facts is None or group.draining:
            phase = "draining" if group.draining else group.supervisor.phase
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{first.hello.group} is not ready: {phase}")
        return first.hello, group

    async def _take_over(self, hello: pb.ExecuteHello, group: ServedGroup, context: Context) -> ExecuteStream:
        """The older stream is fenced and its queue discarded before anything of the new one is read."""
        if (hello.epoch, hello.stream) <= group.highest:
            seen = "epoch {}, stream {}".format(*group.highest)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"the highest seen is {seen}: say hello with more than that")
        group.highest = (hello.epoch, hello.stream)
        if group.current is not None:
            group.current.outbox.close(Fenced(f"epoch {hello.epoch}, stream {hello.stream} has taken the group over"))
        group.current = ExecuteStream(hello.epoch, hello.stream)
        return group.current

    async def _read(self, incoming: Requests, group: ServedGroup, supervisor: Supervisor, stream: ExecuteStream) -> None:
        """Plans to the supervisor, until the stream ends one way or the other."""
        try:
            async for message in incoming:
                if group.current is not stream:
                    return
                match message.WhichOneof("message"):
                    case "plan":
                        supervisor.submit(decode(message.plan), message.plan, stream.on_result)
                    case "goodbye":
                        stream.tell_end(f"the scheduler has ended it: {message.goodbye.reason[:MAX_REASON]}")
                        break
            stream.tell_end(GONE)  # here, since nobody may be reading the outbox any more
            stream.outbox.close()
        except LockstepError as error:
            stream.outbox.close(error)

    async def _group(self, name: str, context: Context) -> ServedGroup:
        group = self.groups.get(name)
        if group is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no group {name!r} here, only {', '.join(map(repr, self.groups))}"[:500])
        return group

    async def drain(self, within_s: float) -> None:
        """Until the schedulers have let go of all groups, or the time is over."""
        until = time.monotonic() + within_s
        for group in self.groups.values():
            group.drain(min(round(within_s * 1e3), MAX_REMAINING_MS))
        while any(group.current is not None for group in self.groups.values()) and time.monotonic() < until:
            await asyncio.sleep(DRAINED_EVERY_S)


async def _checked_version(theirs: str, context: Context) -> None:
    try:
        check_version(theirs, "the caller")
    except ProtocolError as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
