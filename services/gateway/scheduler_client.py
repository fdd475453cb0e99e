"""The one session that this gateway process has with its scheduler."""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from services.gateway import model as models
from services.gateway.errors import Unavailable
from services.gateway.generation import RETRY_AFTER_S, Generation
from services.gateway.model import Model
from shared import rpc
from shared.errors import LockstepError, ProtocolError
from shared.protocol.generation_pb2 import (
    Cancel,
    FinishReason,
    GenerationSessionRequest,
    GenerationSessionResponse,
    SessionHeartbeat,
    SessionHello,
    Submit,
    TokenBatch,
)
from shared.protocol.generation_pb2_grpc import GenerationStub

logger = logging.getLogger(__name__)

RECONNECT_S = 0.25  # doubled after each failure
MAX_RECONNECT_S = 2.0

Outbox = rpc.Outbox[GenerationSessionRequest]


class SchedulerClient:
    """Keeps a session up, submits requests to it and hands what comes back to their generations.

    All on one event loop: the reader of the session never waits for a request or for the writer.
    """

    def __init__(self, target: str, max_unread_tokens: int) -> None:
        self.model: Model | None = None  # of the last session
        self._target = target
        self._max_unread_tokens = max_unread_tokens
        self._name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._highest_epoch = 0
        self._outbox: Outbox | None = None  # of the session that is up
        self._generations: dict[int, Generation] = {}
        self._last_request = 0
        self._failures = 0  # in a row

    @property
    def is_up(self) -> bool:
        """Whether there is a session. Callable from any thread."""
        return self.model is not None and self._outbox is not None

    @property
    def ready_model(self) -> Model:
        """The model that is served now. Raises Unavailable while there is no session."""
        if self.model is None or not self.is_up:
            raise Unavailable("the service is starting or has lost its backend: try again later", retry_after_s=RETRY_AFTER_S)
        return self.model

    def submit(self, submit: Submit, wake: asyncio.Event) -> Generation:
        """Sends the request, its number and attempt filled in; `wake` is set when it has news. Raises Unavailable."""
        if self._outbox is None:
            raise Unavailable("the backend was lost: try again later", retry_after_s=RETRY_AFTER_S)
        self._last_request += 1
        submit.request, submit.attempt = self._last_request, 1
        generation = Generation(submit, wake, self._max_unread_tokens, self._on_close)
        if not submit.max_tokens:  # nothing to ask for
            generation.finish_at_once()
            return generation
        self._generations[generation.request] = generation
        self._outbox.put(GenerationSessionRequest(submit=submit))
        return generation

    async def run(self) -> None:
        """Connects, and connects again whenever the session ends; until cancelled."""
        told = ""
        while True:
            try:
                async with rpc.channel(self._target) as channel:
                    await self._serve(GenerationStub(channel))
                cause = "the scheduler has ended the session"
            except grpc.aio.AioRpcError as error:
                cause = f"{error.code().name.lower()}: {error.details()}"
            except LockstepError as error:
                cause = str(error)
            if cause != told or not self._failures:
                logger.warning("no session with the scheduler at %s: %s", self._target, cause)
                told = cause
            await asyncio.sleep(min(RECONNECT_S * 2**self._failures, MAX_RECONNECT_S))
            self._failures = min(self._failures + 1, 10)

    async def _serve(self, stub: GenerationStub) -> None:
        """One session, from the description of the model to its end."""
        description = await models.describe(stub)
        if self.model is None or self.model.fingerprint != description.fingerprint:
            self.model = await models.load(stub, description)
        outbox: Outbox = rpc.Outbox(lambda: GenerationSessionRequest(heartbeat=SessionHeartbeat()))
        hello = SessionHello(protocol_version=rpc.PROTOCOL_VERSION, gateway=self._name, highest_epoch=self._highest_epoch)
        outbox.put(GenerationSessionRequest(hello=hello))
        call = stub.Session(aiter(outbox))
        try:
            async with aclosing(rpc.received(aiter(call), "the scheduler")) as messages:
                await self._welcomed(messages)
                self._outbox, self._failures = outbox, 0
                logger.info("session with the scheduler at %s, epoch %d", self._target, self._highest_epoch)
                async for message in messages:
                    if message.WhichOneof("message") == "batch":
                        self._dispatch(message.batch)
        finally:
            self._outbox = None
            outbox.close()
            call.cancel()
            self._lose_all()

    async def _welcomed(self, messages: AsyncIterator[GenerationSessionResponse]) -> None:
        """Reads the scheduler's hello. Raises ProtocolError when it is none of ours or led by a scheduler that was replaced."""
        first = await anext(messages, None)
        if first is None or first.WhichOneof("message") != "welcome":
            raise ProtocolError("the scheduler does not begin its session with a welcome")
        rpc.check_version(first.welcome.protocol_version, "the scheduler")
        if first.welcome.epoch < self._highest_epoch:
            raise ProtocolError(f"the scheduler is of epoch {first.welcome.epoch}, {self._highest_epoch} has taken over")
        self._highest_epoch = first.welcome.epoch

    def _dispatch(self, batch: TokenBatch) -> None:
        for tokens in batch.tokens:
            if generation := self._generations.get(tokens.request):
                generation.on_tokens(tokens)
        for finished in batch.finished:
            if generation := self._generations.get(finished.request):
                generation.on_finished(finished)
                self._forget_if_over(generation)
        for rejected in batch.rejected:
            if generation := self._generations.get(rejected.request):
                generation.on_rejected(rejected)
                self._forget_if_over(generation)

    def _forget_if_over(self, generation: Generation) -> None:
        if generation.over:
            self._generations.pop(generation.request, None)

    def _on_close(self, generation: Generation, accepted_tokens: int, stopped: bool) -> None:
        """Cancels a request that the scheduler has not ended itself."""
        if self._generations.pop(generation.request, None) and self._outbox is not None:
            cancel = Cancel(request=generation.request, attempt=generation.submit.attempt, accepted_tokens=accepted_tokens)
            if stopped:
                cancel.reason = FinishReason.FINISH_REASON_STOP
            self._outbox.put(GenerationSessionRequest(cancel=cancel))

    def _lose_all(self) -> None:
        """Ends every live request: with a next attempt, requests would be submitted again instead."""
        lost, self._generations = self._generations, {}
        for generation in lost.values():
            generation.fail(Unavailable("the backend was lost: try again later", retry_after_s=RETRY_AFTER_S))
