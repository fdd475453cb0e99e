"""The scheduler's gRPC side: what gateways ask, and the sessions that carry their requests."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from itertools import count

import grpc

from services.scheduler.history import History
from services.scheduler.leadership import Leadership
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.requests import Key, Request
from services.scheduler.scheduler import Scheduler
from services.scheduler.session import GatewaySession
from services.scheduler.settings import SchedulerSettings
from services.scheduler.status import status_of
from shared.errors import LockstepError, ProtocolError
from shared.protocol import files
from shared.protocol import generation_pb2 as pb
from shared.protocol.generation_pb2_grpc import GenerationServicer
from shared.protocol.submits import MAX_SUBMITS
from shared.rpc import PROTOCOL_VERSION, Context, check_version, received

logger = logging.getLogger(__name__)

Messages = AsyncIterator[pb.GenerationSessionRequest]

NOT_READY = "no worker group has been ready yet"
STANDBY = "a standby: another scheduler leads"
STOPPING = "stopping: ask another scheduler, or the one that comes after"


class GenerationService(GenerationServicer):
    """Sessions in front of one `Scheduler`, which it makes."""

    def __init__(self, settings: SchedulerSettings, leadership: Leadership, metrics: SchedulerMetrics, history: History) -> None:
        self.leadership = leadership
        self._metrics = metrics
        self.scheduler = Scheduler(
            settings.max_waiting_requests,
            settings.max_waiting_tokens,
            settings.group_wait_s,
            self._deliver,
            metrics,
            time.monotonic(),
            history,
            later=lambda work: asyncio.get_running_loop().call_soon(work),
        )
        self._sessions: dict[int, GatewaySession] = {}
        self._stopping = False
        self._numbers = count(1)

    async def Describe(self, request: pb.GenerationDescribeRequest, context: Context) -> pb.GenerationDescribeResponse:
        try:
            check_version(request.protocol_version, "the gateway")
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        if not self.leadership.leads or self._stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING if self._stopping else STANDBY)
        model = self.scheduler.model
        if model is None or not self.scheduler.groups:
            await context.abort(grpc.StatusCode.UNAVAILABLE, NOT_READY if model is None else "no worker group is ready")
        return pb.GenerationDescribeResponse(
            protocol_version=PROTOCOL_VERSION,
            fingerprint=model.fingerprint,
            epoch=self.leadership.epoch,
            vocab_size=model.vocab_size,
            max_length=model.max_length,
            eos_ids=sorted(model.eos_ids),
        )

    async def Files(self, request: pb.GenerationFilesRequest, context: Context) -> AsyncIterator[pb.GenerationFilesResponse]:
        model = self.scheduler.model
        if model is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, NOT_READY)
        if request.fingerprint != model.fingerprint:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"the model here is {model.fingerprint}")
        for message in files.messages(model.files, pb.GenerationFilesResponse):
            yield message

    async def Status(self, request: pb.GenerationStatusRequest, context: Context) -> pb.GenerationStatusResponse:
        return status_of(self._metrics)

    async def Session(self, request_iterator: Messages, context: Context) -> AsyncIterator[pb.GenerationSessionResponse]:
        if not self.leadership.leads or self._stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING if self._stopping else STANDBY)
        messages = received(request_iterator, "the gateway")
        try:
            session = await self._hello(messages)
        except LockstepError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        logger.info("gateway %s: session %d", session.gateway, session.number)
        reader = asyncio.create_task(self._read(messages, session))
        try:
            async for message in session.outbox:
                yield message
        except LockstepError as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        finally:
            reader.cancel()
            self._close(session)

    async def _hello(self, messages: Messages) -> GatewaySession:
        message = await anext(messages, None)
        if message is None or message.WhichOneof("message") != "hello":
            raise ProtocolError("a session begins with a hello")
        check_version(message.hello.protocol_version, "the gateway")
        await self.leadership.shown(message.hello.highest_epoch)
        session = GatewaySession(next(self._numbers), message.hello.gateway[:100], time.monotonic)
        self._sessions[session.number] = session
        session.outbox.put(
            pb.GenerationSessionResponse(welcome=pb.SessionWelcome(protocol_version=PROTOCOL_VERSION, epoch=self.leadership.epoch))
        )
        if self._stopping:  # since it was let in
            session.end()
        return session

    async def _read(self, messages: Messages, session: GatewaySession) -> None:
        """Until the gateway ends or breaks the session, either of which ends the writer too."""
        try:
            async for message in messages:
                self._on_message(message, session)
            session.left = True
            session.outbox.close()
        except LockstepError as error:
            session.outbox.close(error)
        except Exception:  # the edge: a defect costs this session, not the scheduler
            logger.exception("gateway %s: session %d failed", session.gateway, session.number)
            session.outbox.close(LockstepError("the session failed; the scheduler's log says why"))

    def _on_message(self, message: pb.GenerationSessionRequest, session: GatewaySession) -> None:
        now = time.monotonic()
        match message.WhichOneof("message"):
            case "submit":
                self._submit([message.submit], session, now)
            case "submits":
                if len(message.submits.submits) > MAX_SUBMITS:
                    raise ProtocolError(f"{len(message.submits.submits)} requests in one message, at most {MAX_SUBMITS} may be")
                self._submit(message.submits.submits, session, now)
            case "cancel":
                stopped = message.cancel.reason == pb.FINISH_REASON_STOP
                key, accepted = Key(session.number, message.cancel.request), message.cancel.accepted_tokens
                self.scheduler.cancel(key, message.cancel.attempt, now, stopped=stopped, accepted_tokens=accepted)
            case "heartbeat":
                pass
            case other:
                raise ProtocolError(f"a session does not go on with {other}")

    def _submit(self, submits: Sequence[pb.Submit], session: GatewaySession, now: float) -> None:
        rejections = self.scheduler.submit_all(submits, session.number, now)
        for submit, rejected in zip(submits, rejections, strict=True):
            if rejected is not None:
                session.reject(submit.request, submit.attempt, rejected)
        if any(rejections):
            session.flush()

    def _close(self, session: GatewaySession) -> None:
        del self._sessions[session.number]
        session.close()
        requests = self.scheduler.drop_session(session.number, time.monotonic())
        if session.left:
            self._metrics.cut_off("gateway", requests)
        logger.info("gateway %s: session %d has ended", session.gateway, session.number)

    def end_sessions(self) -> None:
        """Ends each after all that its requests have got, and begins none: what they have not, the gateway asks of the next leader."""
        self._stopping = True
        for session in self._sessions.values():
            session.end()

    def _deliver(self, updated: list[Request], now: float) -> None:
        touched: dict[int, GatewaySession] = {}
        for request in updated:
            session = self._sessions.get(request.key.session)
            if session is not None:  # None: the gateway is gone
                session.update(request)
                touched[session.number] = session
        for session in touched.values():
            session.flush()
