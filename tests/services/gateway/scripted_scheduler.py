"""The remote side of a gateway's session: a gRPC server that plays given token ids instead of scheduling anything."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from shared import rpc
from shared.ports import port_of, reserve
from shared.protocol import files
from shared.protocol.files import ModelFile
from shared.protocol.generation_pb2 import (
    Cancel,
    Finished,
    FinishReason,
    GenerationDescribeResponse,
    GenerationFilesResponse,
    GenerationSessionRequest,
    GenerationSessionResponse,
    GenerationStatusResponse,
    Logprobs,
    Rejected,
    RejectReason,
    SessionHeartbeat,
    SessionHello,
    SessionWelcome,
    Submit,
    TokenBatch,
    Tokens,
)
from shared.protocol.generation_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server
from shared.protocol.plan import ids_from_bytes, ids_to_bytes

Outbox = rpc.Outbox[GenerationSessionResponse]
STOP, LENGTH, ERROR = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH, FinishReason.FINISH_REASON_ERROR


@dataclass
class Script:
    """What one request gets: ids step by step, an Event being waited for, then the end. Cut at the request's max_tokens."""

    steps: Iterable[Sequence[int] | asyncio.Event] = ()
    reason: FinishReason = STOP
    step_s: float = 0.0
    cached_tokens: int = 0
    detail: str = ""
    lost_tokens: int = 0  # that the end counts and that never came
    index_shift: int = 0  # added to the first index of every step but the first
    finishes_apart: bool = False  # the end in a message of its own
    rejected: RejectReason | None = None
    retry_after_ms: int = 0
    waits_for: asyncio.Event | None = None  # before anything comes, the prompt's log-probabilities too


@dataclass
class ScriptedScheduler(GenerationServicer):
    """`script` says what a request gets; what the gateway sends is kept."""

    folder: Path
    vocab_size: int = 384
    max_length: int = 256
    eos_ids: Sequence[int] = (2,)
    epoch: int = 1
    fingerprint: str = "f" * 64
    ready: bool = True
    script: Callable[[Submit], Script] = lambda submit: Script()
    submits: list[Submit] = field(default_factory=list)
    messages: int = 0  # that brought the submits
    cancels: list[Cancel] = field(default_factory=list)
    hellos: list[SessionHello] = field(default_factory=list)
    welcomes: asyncio.Event | None = None  # while it is not set, only the first session is welcomed
    left: int = 0  # sessions that the gateway has ended in good order
    files_calls: int = 0
    status: GenerationStatusResponse | None = None  # None: as a scheduler of before, which tells none
    status_calls: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        self._server: grpc.aio.Server | None = None
        self._reservation: socket.socket | None = None  # of the port, while it is dead
        self._outboxes: list[Outbox] = []
        self._silent = False

    async def start(self) -> None:
        """Listens, each time on the same port."""
        self._silent = False
        if self._reservation is None:
            self._reservation = reserve("127.0.0.1")
        self._server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        add_GenerationServicer_to_server(self, self._server)
        self.port = await rpc.start_server(self._server, "127.0.0.1", port_of(self._reservation))

    async def stop(self, grace_s: float = 0.0) -> None:
        """Dies: all sessions break that have not ended by themselves within the grace, and nobody else gets the port."""
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None

    async def close(self) -> None:
        """Dies for good."""
        await self.stop()
        if self._reservation is not None:
            self._reservation.close()

    async def end_sessions(self) -> None:
        """Ends every session in good order."""
        for outbox in self._outboxes:
            outbox.close()

    def fall_silent(self) -> None:
        """Sends nothing any more, as a machine that hangs."""
        self._silent = True

    @property
    def prompts(self) -> list[list[int]]:
        return [ids_from_bytes(submit.prompt_ids).tolist() for submit in self.submits]

    async def Describe(self, request, context):
        if not self.ready:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no worker group is ready")
        return GenerationDescribeResponse(
            protocol_version=rpc.PROTOCOL_VERSION,
            fingerprint=self.fingerprint,
            epoch=self.epoch,
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            eos_ids=self.eos_ids,
        )

    async def Files(self, request, context):
        self.files_calls += 1
        for message in files.messages([ModelFile(path.name, path.read_bytes()) for path in self.folder.iterdir()], GenerationFilesResponse):
            yield message

    async def Status(self, request, context):
        self.status_calls += 1
        if self.status is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        return self.status

    async def Session(self, request_iterator, context):
        outbox: Outbox = rpc.Outbox(lambda: GenerationSessionResponse(heartbeat=SessionHeartbeat()))
        reader = asyncio.create_task(self._read(request_iterator, outbox))
        self._outboxes.append(outbox)
        try:
            async for message in outbox:
                if self._silent:
                    await asyncio.Event().wait()
                yield message
        finally:
            self._outboxes.remove(outbox)
            reader.cancel()

    async def _read(self, requests: AsyncIterator[GenerationSessionRequest], outbox: Outbox) -> None:
        players: dict[int, asyncio.Task[None]] = {}
        with contextlib.ExitStack() as cleanup:
            async for request in requests:
                if request.HasField("hello"):
                    self.hellos.append(request.hello)
                    if self.welcomes is not None and len(self.hellos) > 1:
                        await self.welcomes.wait()
                    welcome = SessionWelcome(protocol_version=rpc.PROTOCOL_VERSION, epoch=self.epoch)
                    outbox.put(GenerationSessionResponse(welcome=welcome))
                elif request.HasField("submit") or request.HasField("submits"):
                    self.messages += 1
                    for submit in [request.submit] if request.HasField("submit") else request.submits.submits:
                        self.submits.append(submit)
                        players[submit.request] = asyncio.create_task(self._play(submit, self.script(submit), outbox))
                        cleanup.callback(players[submit.request].cancel)
                elif request.HasField("cancel"):
                    self.cancels.append(request.cancel)
                    players[request.cancel.request].cancel()
        self.left += 1
        outbox.close()

    def _scores(self, ids: Sequence[int], top: int) -> Logprobs:
        """Each id beside `top` likeliest ones: itself, and those after it. -1 for itself, one less each time; -inf for EOS."""
        likeliest = [[(id_ + step) % self.vocab_size for step in range(top)] for id_ in ids]
        values = [float("-inf") if id_ in self.eos_ids else -1.0 for id_ in ids]
        return Logprobs(
            values=np.array(values, "<f4").tobytes(),
            top=top,
            top_ids=np.array(likeliest, "<i4").tobytes(),
            top_values=np.array([[-1.0 - step for step in range(top)] for _ in ids], "<f4").tobytes(),
        )

    async def _play(self, submit: Submit, script: Script, outbox: Outbox) -> None:
        name: dict[str, Any] = {"request": submit.request, "attempt": submit.attempt}
        if script.rejected is not None:
            rejected = Rejected(**name, reason=script.rejected, detail=script.detail, retry_after_ms=script.retry_after_ms)
            outbox.put(GenerationSessionResponse(batch=TokenBatch(rejected=[rejected])))
            return
        if script.waits_for is not None:
            await script.waits_for.wait()
        length, reason, batch = 0, script.reason if submit.max_tokens else LENGTH, TokenBatch()
        delivered = len(submit.delivered_ids) // 4  # of an earlier attempt
        if submit.HasField("prompt_logprobs") and not delivered:
            for position, id_ in enumerate(ids_from_bytes(submit.prompt_ids).tolist()[1:], start=1):
                news = Tokens(**name, prompt_logprobs=self._scores([id_], submit.prompt_logprobs), first_position=position)
                outbox.put(GenerationSessionResponse(batch=TokenBatch(tokens=[news])))
        for step in script.steps if submit.max_tokens else ():
            if isinstance(step, asyncio.Event):
                await step.wait()
                continue
            if length + len(step) <= delivered:
                length += len(step)
                continue
            await asyncio.sleep(script.step_s)
            ids = list(step)[max(delivered - length, 0) : submit.max_tokens - length]
            length = max(length, delivered)
            index = length + (script.index_shift if length else 0)
            cached_tokens = 0 if length else script.cached_tokens
            scores = self._scores(ids, submit.logprobs) if submit.HasField("logprobs") else None
            news = Tokens(**name, first_index=index, ids=ids_to_bytes(ids), cached_tokens=cached_tokens, logprobs=scores)
            batch = TokenBatch(tokens=[news])
            length += len(ids)
            if length == submit.max_tokens:
                is_eos = ids[-1] in self.eos_ids and not submit.ignore_eos
                reason = STOP if is_eos else LENGTH
                break
            outbox.put(GenerationSessionResponse(batch=batch))
            batch = TokenBatch()
        finished = Finished(
            **name,
            reason=reason,
            completion_tokens=length + script.lost_tokens,
            cached_tokens=script.cached_tokens,
            detail=script.detail,
        )
        if script.finishes_apart and batch.tokens:
            outbox.put(GenerationSessionResponse(batch=batch))
            batch = TokenBatch()
        batch.finished.append(finished)
        outbox.put(GenerationSessionResponse(batch=batch))
