"""A gateway reduced to its session: submits, and keeps what comes back in order."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from shared.protocol import generation_pb2 as pb
from shared.protocol.generation_pb2_grpc import GenerationStub
from shared.protocol.plan import ids_from_bytes, ids_to_bytes
from shared.rpc import PROTOCOL_VERSION, Outbox, channel, received


@dataclass
class Answer:
    """What came for one attempt of a request; `ids` must follow each other without a gap."""

    ids: list[int] = field(default_factory=list)
    finished: pb.Finished | None = None
    rejected: pb.Rejected | None = None

    @property
    def ended(self) -> bool:
        return self.finished is not None or self.rejected is not None


def submit(request: int, prompt: list[int], max_tokens: int, attempt: int = 1, delivered: tuple[int, ...] = (), **fields: Any) -> pb.Submit:
    return pb.Submit(
        request=request,
        attempt=attempt,
        prompt_ids=ids_to_bytes(prompt),
        delivered_ids=ids_to_bytes(list(delivered)),
        max_tokens=max_tokens,
        sampling=pb.Sampling(temperature=0, seed=1),
        **fields,
    )


class SessionClient:
    """`silent` stops its heartbeats."""

    def __init__(self, stub: GenerationStub, highest_epoch: int = 0) -> None:
        self.outbox: Outbox[pb.GenerationSessionRequest] = Outbox(lambda: pb.GenerationSessionRequest(heartbeat=pb.SessionHeartbeat()))
        hello = pb.SessionHello(protocol_version=PROTOCOL_VERSION, gateway="test", highest_epoch=highest_epoch)
        self.outbox.put(pb.GenerationSessionRequest(hello=hello))
        self.call = stub.Session(aiter(self.outbox))
        self.answers: dict[tuple[int, int], Answer] = {}
        self.unplanned_moves: dict[int, int] = {}  # by request, as told
        self.batches = 0
        self.epoch = 0
        self.ended_well = False
        self._changed = asyncio.Condition()

    def submit(self, message: pb.Submit) -> None:
        self._expect(message)
        self.outbox.put(pb.GenerationSessionRequest(submit=message))

    def submit_together(self, *messages: pb.Submit) -> None:
        for message in messages:
            self._expect(message)
        self.outbox.put(pb.GenerationSessionRequest(submits=pb.Submits(submits=messages)))

    def _expect(self, message: pb.Submit) -> None:
        self.answers[message.request, message.attempt] = Answer(list(ids_from_bytes(message.delivered_ids)))

    def cancel(self, request: int, attempt: int = 1, accepted: int = 0) -> None:
        self.outbox.put(pb.GenerationSessionRequest(cancel=pb.Cancel(request=request, attempt=attempt, accepted_tokens=accepted)))

    async def ended(self, request: int, attempt: int = 1, within_s: float = 30.0) -> Answer:
        return await self.until(request, lambda answer: answer.ended, attempt, within_s)

    async def until(self, request: int, condition: Any, attempt: int = 1, within_s: float = 30.0) -> Answer:
        answer = self.answers[request, attempt]
        async with asyncio.timeout(within_s), self._changed:
            await self._changed.wait_for(lambda: condition(answer))
        return answer

    async def read(self) -> None:
        async for message in received(aiter(self.call), "the scheduler"):
            if message.HasField("welcome"):
                self.epoch = message.welcome.epoch
            if message.HasField("batch"):
                self._take(message.batch)
            async with self._changed:
                self._changed.notify_all()
        self.ended_well = True

    def _take(self, batch: pb.TokenBatch) -> None:
        self.batches += 1
        for tokens in batch.tokens:
            answer = self.answers[tokens.request, tokens.attempt]
            assert tokens.first_index == len(answer.ids), "lost, repeated or reordered"
            assert not answer.ended
            self.unplanned_moves[tokens.request] = tokens.unplanned_moves
            answer.ids.extend(ids_from_bytes(tokens.ids).tolist())
        for finished in batch.finished:
            answer = self.answers[finished.request, finished.attempt]
            assert not answer.ended
            answer.finished = finished
        for rejected in batch.rejected:
            answer = self.answers[rejected.request, rejected.attempt]
            assert not answer.ended
            answer.rejected = rejected


@contextlib.asynccontextmanager
async def session(target: str, highest_epoch: int = 0) -> AsyncIterator[SessionClient]:
    async with channel(target) as opened:
        client = SessionClient(GenerationStub(opened), highest_epoch)
        reader = asyncio.create_task(client.read())
        try:
            yield client
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await reader
            client.call.cancel()
