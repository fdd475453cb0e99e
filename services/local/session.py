"""A session with the scheduler without a gateway: what an offline client asks goes the way that production's requests go."""

import asyncio
import contextlib
import os
import socket
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shared.errors import LockstepError, PeerLost, ProtocolError
from shared.protocol.generation_pb2 import (
    Cancel,
    Finished,
    FinishReason,
    GenerationSessionRequest,
    GenerationSessionResponse,
    Rejected,
    SessionHeartbeat,
    SessionHello,
    Submit,
    TokenBatch,
    Tokens,
)
from shared.protocol.generation_pb2 import Logprobs as LogprobsMessage
from shared.protocol.generation_pb2_grpc import GenerationStub
from shared.protocol.plan import Int32s, ids_from_bytes
from shared.protocol.submits import next_message
from shared.rpc import PROTOCOL_VERSION, Outbox, check_version, received

OnProgress = Callable[[int, int], None]  # (requests that have ended, tokens that have come)

ENDINGS: dict[int, Literal["stop", "length"]] = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
}


class RequestFailed(LockstepError):
    """The scheduler refused a request or could not finish it; those beside it were cancelled."""


@dataclass(frozen=True)
class Logprobs:
    """Of n tokens and of the k likeliest ids at each place: the model's own, before temperature, penalties and filters."""

    values: NDArray[np.float32]  # [n]
    top_ids: Int32s  # [n, k], the likeliest first; NO_TOP_ID past the last id of a small vocabulary
    top_values: NDArray[np.float32]  # [n, k]


@dataclass(eq=False)
class Answer:
    """What has come for one request."""

    index: int  # of the request among those that were asked together
    ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: list[Logprobs] = field(default_factory=list)  # of the ids, run by run, where they were asked for
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None  # None: it has not ended
    cached_tokens: int = 0  # of the prompt, that were not computed anew


class Session:
    """Requests are answered in batches of any size, of which at most `window` are with the scheduler at a time."""

    def __init__(self, stub: GenerationStub, window: int) -> None:
        self._window = window
        self._outbox: Outbox[GenerationSessionRequest] = Outbox(
            lambda: GenerationSessionRequest(heartbeat=SessionHeartbeat()), next_message
        )
        name = f"offline-{socket.gethostname()}-{os.getpid()}-{id(self):x}"
        self._outbox.put(GenerationSessionRequest(hello=SessionHello(protocol_version=PROTOCOL_VERSION, gateway=name)))
        self._call = stub.Session(aiter(self._outbox))
        self._last_request = 0
        self._open: dict[int, Answer] = {}  # by request
        self._changed = asyncio.Event()  # an answer has ended, or the session
        self._failure: LockstepError | None = None  # of a request, or of the session
        self._tokens = 0  # of all answers so far
        self._reader = asyncio.create_task(self._read())

    async def complete(self, submits: Sequence[Submit], on_progress: OnProgress) -> list[Answer]:
        """The answers, in the order of the requests; numbers and attempts are filled in here.

        Raises RequestFailed for the first that cannot be answered, PeerLost when the session breaks; either cancels the others.
        """
        answers = [Answer(index) for index in range(len(submits))]
        waiting, tokens_before = iter(zip(answers, submits, strict=True)), self._tokens
        sent = 0
        try:
            while True:
                while len(self._open) < self._window and (next_ := next(waiting, None)) is not None:
                    self._submit(*next_)
                    sent += 1
                if self._failure is not None:
                    raise self._failure
                on_progress(sent - len(self._open), self._tokens - tokens_before)
                if not self._open:
                    return answers
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._give_up()

    async def close(self) -> None:
        """Ends the session; the scheduler cancels what is still open."""
        self._reader.cancel()
        self._outbox.close()
        self._call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    def _submit(self, answer: Answer, submit: Submit) -> None:
        self._last_request += 1
        submit.request, submit.attempt, submit.request_id = self._last_request, 1, f"offline-{self._last_request}"
        self._open[submit.request] = answer
        self._outbox.put(GenerationSessionRequest(submit=submit))

    def _give_up(self) -> None:
        """Cancels what is open; what still comes of it belongs to nobody."""
        for request in self._open:
            self._outbox.put(GenerationSessionRequest(cancel=Cancel(request=request, attempt=1)))
        self._open.clear()
        if isinstance(self._failure, RequestFailed):
            self._failure = None  # the session goes on

    def _fail(self, error: LockstepError) -> None:
        self._failure = self._failure or error
        self._changed.set()

    async def _read(self) -> None:
        """Until the session ends, which is a failure whoever ends it."""
        try:
            messages = received(aiter(self._call), "the scheduler")
            async with contextlib.aclosing(messages):
                await self._welcomed(messages)
                async for message in messages:
                    if message.WhichOneof("message") == "batch":
                        self._on_batch(message.batch)
            self._fail(PeerLost("the scheduler has ended the session"))
        except LockstepError as error:
            self._fail(error)

    async def _welcomed(self, messages: AsyncIterator[GenerationSessionResponse]) -> None:
        first = await anext(messages, None)
        if first is None or first.WhichOneof("message") != "welcome":
            raise ProtocolError("the scheduler does not begin its session with a welcome")
        check_version(first.welcome.protocol_version, "the scheduler")

    def _on_batch(self, batch: TokenBatch) -> None:
        for tokens in batch.tokens:
            if answer := self._open.get(tokens.request):
                self._on_tokens(answer, tokens)
        for finished in batch.finished:
            if answer := self._open.get(finished.request):
                self._on_finished(answer, finished)
        for rejected in batch.rejected:
            if answer := self._open.get(rejected.request):
                self._on_rejected(answer, rejected)
        self._changed.set()

    def _on_tokens(self, answer: Answer, tokens: Tokens) -> None:
        if tokens.first_index != len(answer.ids):
            self._fail(ProtocolError(f"request {tokens.request}: ids from {tokens.first_index} on, where {len(answer.ids)} should follow"))
            return
        ids = ids_from_bytes(tokens.ids)
        answer.ids.frombytes(ids.tobytes())
        self._tokens += len(ids)
        if tokens.HasField("logprobs"):
            answer.logprobs.append(_logprobs(tokens.logprobs))
        if tokens.HasField("prompt_logprobs"):
            answer.prompt_logprobs.append(_logprobs(tokens.prompt_logprobs))

    def _on_finished(self, answer: Answer, finished: Finished) -> None:
        del self._open[finished.request]
        if finished.reason not in ENDINGS:
            reason = FinishReason.Name(finished.reason)
            self._fail(RequestFailed(f"prompt {answer.index}: {finished.detail or reason}"))
        elif finished.completion_tokens != len(answer.ids):
            self._fail(ProtocolError(f"prompt {answer.index} ended after {finished.completion_tokens} ids, {len(answer.ids)} have come"))
        else:
            answer.finish_reason, answer.cached_tokens = ENDINGS[finished.reason], finished.cached_tokens

    def _on_rejected(self, answer: Answer, rejected: Rejected) -> None:
        del self._open[rejected.request]
        self._fail(RequestFailed(f"prompt {answer.index}: {rejected.detail}"))


def _logprobs(message: LogprobsMessage) -> Logprobs:
    """Raises ProtocolError for lengths that do not fit together."""
    values, top = np.frombuffer(message.values, dtype="<f4"), np.frombuffer(message.top_values, dtype="<f4")
    ids = np.frombuffer(message.top_ids, dtype="<i4")
    if not len(ids) == len(top) == len(values) * message.top:
        raise ProtocolError(
            f"log-probabilities of {len(values)} tokens with {message.top} ids each: {len(ids)} ids, {len(top)} values came"
        )
    shape = (len(values), message.top)
    return Logprobs(values, ids.reshape(shape), top.reshape(shape))
