"""One Execute stream to a group as the scheduler's end of it: hello and welcome, plans out, results in, and a word of goodbye."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Self

import grpc

from services.scheduler.steps import StepResult
from shared.errors import ProtocolError
from shared.protocol import execution_pb2 as pb
from shared.protocol.execution_pb2_grpc import ExecutionStub
from shared.protocol.logprobs import logprobs_from_bytes
from shared.protocol.plan import Limits, Plan, encode, ids_from_bytes
from shared.rpc import PROTOCOL_VERSION, Outbox, StreamEnded, check_version, in_words, received

WELCOME_S = 30.0  # ranks end what they compute before they reset their slots
GOODBYE_S = 1.0  # for the worker to end its side
MAX_PAGE_TABLE = 1 << 28  # entries: slots x pages of a slot
MAX_VOCABULARY = 1 << 24  # ids: four bytes each
MAX_SLOT_PAGES = 1 << 16  # of a request: when all are cached its admission names them all, in 768 KB of a plan
MAX_PAGES = 1 << 24  # of a group: their books are made at once, 0.4 s for so many, and other groups wait meanwhile


class ExecuteStream:
    """A context, in which the group is ours. `epoch` and `number` are above all that it has seen."""

    def __init__(self, stub: ExecutionStub, group: str, epoch: int, number: int) -> None:
        self.epoch, self.number = epoch, number
        self._outbox: Outbox[pb.ExecutionExecuteRequest] = Outbox(lambda: pb.ExecutionExecuteRequest(heartbeat=pb.ExecuteHeartbeat()))
        hello = pb.ExecuteHello(protocol_version=PROTOCOL_VERSION, group=group, epoch=epoch, stream=number)
        self._outbox.put(pb.ExecutionExecuteRequest(hello=hello))
        self._call = stub.Execute(aiter(self._outbox))
        self.highest_slot_epoch = 0  # used before

    async def __aenter__(self) -> Self:
        """Returns once every rank has reset its slots. Raises StreamEnded or ProtocolError when that does not come about."""
        try:
            async with asyncio.timeout(WELCOME_S):
                welcome = await self._welcome()
        except BaseException as error:
            self._close()
            if isinstance(error, TimeoutError):
                raise StreamEnded(f"the worker was not ready for us within {WELCOME_S:g} s") from error
            raise
        self.highest_slot_epoch = welcome.highest_slot_epoch
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def send(self, plan: Plan) -> None:
        self._outbox.put(pb.ExecutionExecuteRequest(plan=encode(plan)))

    async def messages(self) -> AsyncIterator[pb.ExecutionExecuteResponse]:
        """All but the welcome. Raises StreamEnded when the worker ends it, ProtocolError for what cannot come."""
        async for message in received(aiter(self._call), "the worker"):
            if message.WhichOneof("message") == "result" and (message.result.epoch, message.result.stream) != (self.epoch, self.number):
                raise ProtocolError(f"a result of stream {message.result.epoch}.{message.result.stream}")
            yield message
        raise StreamEnded("the worker ended the stream")

    async def goodbye(self, reason: str) -> None:
        """Tells the worker why we end the stream, if it still listens."""
        self._outbox.put(pb.ExecutionExecuteRequest(goodbye=pb.ExecuteGoodbye(reason=reason)))
        self._outbox.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._call.code(), GOODBYE_S)

    async def _welcome(self) -> pb.ExecuteWelcome:
        async for message in received(aiter(self._call), "the worker", WELCOME_S):
            match message.WhichOneof("message"):
                case "welcome":
                    check_version(message.welcome.protocol_version, "the worker")
                    return message.welcome
                case "heartbeat":
                    continue
                case other:
                    raise ProtocolError(f"an Execute stream does not begin with {other}")
        raise StreamEnded("the worker ended the stream")

    def _close(self) -> None:
        self._outbox.close()
        self._call.cancel()


@contextlib.contextmanager
def grpc_errors() -> Iterator[None]:
    """Failed and overdue calls become StreamEnded."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise StreamEnded(in_words(error)) from error
    except TimeoutError as error:
        raise StreamEnded("no answer in time") from error


def limits_of(described: pb.WorkerGroup) -> Limits:
    """Raises ProtocolError when nothing could run within them, the books would not fit into memory, or a request not into a plan."""
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
    if limits.vocab_size > MAX_VOCABULARY:
        raise ProtocolError(f"refused: a vocabulary of {limits.vocab_size} ids is larger than {MAX_VOCABULARY}")
    if limits.slots * limits.pages_per_slot > MAX_PAGE_TABLE:
        raise ProtocolError(f"refused: {limits.slots} slots of {limits.pages_per_slot} pages are more than {MAX_PAGE_TABLE} entries")
    if min(limits.pages_per_slot, limits.pages - 1) > MAX_SLOT_PAGES:
        raise ProtocolError(f"refused: a request may have more than {MAX_SLOT_PAGES} pages: give the worker a larger --page-size")
    return limits


def step_result(result: pb.PlanResult) -> StepResult:
    """Raises ProtocolError when its parts do not fit each other."""
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
