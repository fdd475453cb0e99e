"""The one session that this gateway process has with the scheduler that leads, and the requests that outlive it."""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Literal

import grpc

from services.gateway import model as models
from services.gateway.errors import Unavailable
from services.gateway.generation import RETRY_AFTER_S, Generation
from services.gateway.model import Model
from shared import rpc
from shared.addresses import host_port
from shared.errors import ConfigError, LockstepError, ProtocolError
from shared.process import settle_heap
from shared.protocol.generation_pb2 import (
    Cancel,
    FinishReason,
    GenerationDescribeResponse,
    GenerationSessionRequest,
    GenerationSessionResponse,
    GenerationStatusRequest,
    GenerationStatusResponse,
    SessionHeartbeat,
    SessionHello,
    Submit,
    TokenBatch,
)
from shared.protocol.generation_pb2_grpc import GenerationStub
from shared.protocol.submits import next_message

logger = logging.getLogger(__name__)

RECONNECT_S = 0.25  # doubled after each failure
STATUS_TIMEOUT_S = 2.0
MAX_RECONNECT_S = 1.0
ANSWER_S = 1.0  # of one of several schedulers that says nothing

LOST = "the backend was lost: try again later"

Outbox = rpc.Outbox[GenerationSessionRequest]
Cause = Literal["lost", "moved", "broken"]  # of another attempt: the session broke, was ended in good order, or brought what cannot be


class SchedulerClient:
    """Keeps a session up, submits requests to it and hands what comes back to their generations.

    When the session is lost, requests are held for `wait_s` at most and submitted again to whoever leads then; new ones are held, too.
    All on one event loop: the reader of the session never waits for a request or for the writer.
    """

    def __init__(
        self,
        targets: Sequence[str],
        max_unread_tokens: int,
        wait_s: float,
        on_resubmit: Callable[[Cause], None],
        tls: Path | None = None,
        *,
        apply_generation_config: bool = False,
    ) -> None:
        """targets: `host:port` of the schedulers, of which one leads. on_resubmit: told of every attempt after the first.

        tls: see `shared.tls`. apply_generation_config: the model's files say what requests leave out.
        """
        self.model: Model | None = None  # of the last session
        self._targets, self._tls = targets, tls
        self._max_unread_tokens, self._wait_s = max_unread_tokens, wait_s
        self._on_resubmit = on_resubmit
        self._apply_generation_config = apply_generation_config
        self._name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._highest_epoch = 0
        self._outbox: Outbox | None = None  # of the session that is up
        self._stub: GenerationStub | None = None  # of its scheduler
        self._generations: dict[int, Generation] = {}
        self._last_request = 0
        self._leaving = False
        self._failures = 0  # in a row
        self._lost: Cause = "lost"  # how the last session ended
        self._holding: asyncio.TimerHandle | None = None  # while requests are held: when that ends

    @property
    def is_up(self) -> bool:
        """Whether there is a session. Callable from any thread."""
        return self.model is not None and self._outbox is not None

    @property
    def ready_model(self) -> Model:
        """The model that is served. Raises Unavailable while there is no session, nor one to be expected."""
        if self.model is None or not (self.is_up or self._holding):
            raise Unavailable("the service is starting or has lost its backend: try again later", retry_after_s=RETRY_AFTER_S)
        return self.model

    def submit(self, submit: Submit, wake: asyncio.Event) -> Generation:
        """Sends the request, its number and attempt filled in, or holds it; `wake` is set when it has news. Raises Unavailable."""
        if self._outbox is None and self._holding is None:
            raise Unavailable(LOST, retry_after_s=RETRY_AFTER_S)
        self._last_request += 1
        submit.request, submit.attempt = self._last_request, 1
        generation = Generation(submit, wake, self._max_unread_tokens, self._on_close, lambda broken: self._submit(broken, "broken"))
        if not submit.max_tokens and not submit.HasField("prompt_logprobs"):  # nothing to ask for
            generation.finish_at_once()
            return generation
        self._generations[generation.request] = generation
        self._submit(generation, "lost")
        return generation

    async def status(self) -> GenerationStatusResponse:
        """How the groups of the scheduler stand. Raises Unavailable."""
        if self._stub is None:
            raise Unavailable(LOST, retry_after_s=RETRY_AFTER_S)
        try:
            return await self._stub.Status(GenerationStatusRequest(), timeout=STATUS_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"the scheduler tells no status: {error.code().name.lower()}", retry_after_s=RETRY_AFTER_S) from error

    def leave(self) -> None:
        """Ends the session in good order, and with it `run`: so the scheduler does not take us for one that died."""
        self._leaving = True
        if self._outbox is not None:
            self._outbox.close()

    async def run(self) -> None:
        """Connects, and connects again whenever the session ends; until cancelled or after `leave`, which end all requests.

        Raises ConfigError when the first model has files that cannot be used.
        """
        told = ""
        try:
            while True:
                try:
                    async with AsyncExitStack() as channels:
                        stubs = {
                            address: GenerationStub(await channels.enter_async_context(rpc.channel(address, self._tls, host)))
                            for address, host in (await _addresses(self._targets)).items()
                        }
                        target, description = await self._find_leader(stubs)
                        await self._serve(target, stubs[target], description)
                    if self._leaving:
                        return
                    cause = "the scheduler has ended the session"
                except grpc.aio.AioRpcError as error:
                    cause = rpc.in_words(error)
                except ConfigError as error:
                    if self.model is None:
                        raise
                    cause = str(error)  # of a model that replaces ours: it may be replaced again
                except (LockstepError, OSError) as error:
                    cause = str(error)
                if cause != told or not self._failures:
                    logger.warning("no session with the scheduler at %s: %s", ", ".join(self._targets), cause)
                    told = cause
                await asyncio.sleep(min(RECONNECT_S * 2**self._failures, MAX_RECONNECT_S))
                self._failures = min(self._failures + 1, 10)
        finally:
            self._give_up()

    async def _find_leader(self, stubs: dict[str, GenerationStub]) -> tuple[str, GenerationDescribeResponse]:
        """Asks all schedulers at once: the first whose epoch is not below what we have seen, else the one whose is highest: it has to be
        shown ours. Raises ProtocolError, with what each said, when none leads."""

        async def ask(target: str) -> tuple[str, GenerationDescribeResponse]:
            return target, await models.describe(stubs[target])

        asking = {asyncio.create_task(ask(target)): target for target in stubs}
        found: list[tuple[str, GenerationDescribeResponse]] = []
        failed: dict[str, str] = {}
        try:
            pending = set(asking)
            while pending and not any(description.epoch >= self._highest_epoch for _, description in found):
                limit_s = ANSWER_S if len(stubs) > 1 else None
                done, pending = await asyncio.wait(pending, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    failed |= {asking[task]: f"no answer within {ANSWER_S:g} s" for task in pending}
                    break
                for task in done:
                    try:
                        found.append(task.result())
                    except grpc.aio.AioRpcError as error:
                        failed[asking[task]] = rpc.in_words(error)
                    except LockstepError as error:
                        failed[asking[task]] = str(error)
        finally:
            for task in asking:
                task.cancel()
        if not found:
            raise ProtocolError("; ".join(words if len(stubs) == 1 else f"{target}: {words}" for target, words in sorted(failed.items())))
        return max(found, key=lambda answer: answer[1].epoch)

    async def _serve(self, target: str, stub: GenerationStub, description: GenerationDescribeResponse) -> None:
        """One session, to its end."""
        if self.model is None or self.model.fingerprint != description.fingerprint:
            self._fail_all("the model has changed: try again")  # what has come are ids of another one
            begins = self.model is None
            self.model = await models.load(stub, description, apply_generation_config=self._apply_generation_config)
            if begins:
                settle_heap()
        outbox: Outbox = rpc.Outbox(lambda: GenerationSessionRequest(heartbeat=SessionHeartbeat()), next_message)
        hello = SessionHello(protocol_version=rpc.PROTOCOL_VERSION, gateway=self._name, highest_epoch=self._highest_epoch)
        outbox.put(GenerationSessionRequest(hello=hello))
        call = stub.Session(aiter(outbox))
        try:
            async with aclosing(rpc.received(aiter(call), "the scheduler")) as messages:
                await self._welcomed(messages)
                logger.info("session with the scheduler at %s, epoch %d", target, self._highest_epoch)
                self._stub = stub
                self._come_up(outbox)
                self._lost = "lost"
                async for message in messages:
                    if message.WhichOneof("message") == "batch":
                        self._dispatch(message.batch)
                self._lost = "moved"
        finally:
            self._stub = None
            if self._outbox is not None:
                self._go_down()
            outbox.close()
            call.cancel()

    def _come_up(self, outbox: Outbox) -> None:
        """Submits what was held, in the order in which it came."""
        self._outbox, self._failures = outbox, 0
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
        for generation in list(self._generations.values()):
            self._submit(generation, self._lost)

    def _go_down(self) -> None:
        """Holds what has not ended."""
        self._outbox = None
        self._holding = asyncio.get_running_loop().call_later(self._wait_s, self._give_up)
        if self._generations and not self._leaving:
            logger.warning("%d requests wait up to %g s for a scheduler", len(self._generations), self._wait_s)

    def _give_up(self) -> None:
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
        self._fail_all(LOST)

    def _submit(self, generation: Generation, cause: Cause) -> None:
        """Sends its first attempt or its next one, if there is a session."""
        if self._outbox is None:
            return
        if generation.sent:
            self._on_resubmit(cause)
        submit = generation.next_submit(planned=cause == "moved")
        if submit is None:
            del self._generations[generation.request]
            self._outbox.put(GenerationSessionRequest(cancel=Cancel(request=generation.request, attempt=generation.submit.attempt)))
        else:
            self._outbox.put(GenerationSessionRequest(submit=submit))

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

    def _fail_all(self, message: str) -> None:
        lost, self._generations = self._generations, {}
        for generation in lost.values():
            generation.fail(Unavailable(message, retry_after_s=RETRY_AFTER_S))


async def _addresses(targets: Sequence[str]) -> dict[str, str]:
    """`host:port` of each address that a target's host stands for -> that host: a name may be that of several schedulers.

    Raises OSError when no name is known.
    """
    found: dict[str, str] = {}
    unknown: OSError | None = None
    for target in targets:
        host, _, port = target.rpartition(":")
        host = host.strip("[]")
        try:
            answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            unknown = OSError(f"{host}: {error.strerror or error}")
            continue
        for *_, (address, *_) in answers:
            found[host_port(str(address), int(port))] = host
    if not found and unknown is not None:
        raise unknown
    return found
