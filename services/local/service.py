"""Processes, connection and event loop behind the offline API: what goes on while its caller waits or does something else."""

import asyncio
import contextlib
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc

from services.local.backend import Backend
from services.local.background import BackgroundLoop
from services.local.loading import POLL_EVERY_S
from services.local.progress import StartupProgress
from services.local.session import Session
from shared.addresses import LOOPBACK
from shared.errors import PeerLost
from shared.protocol import files
from shared.protocol import generation_pb2 as pb
from shared.protocol.files import ModelFile
from shared.protocol.generation_pb2_grpc import GenerationStub
from shared.rpc import CONNECT_S, PROTOCOL_VERSION, channel, in_words

T = TypeVar("T")

FILES_TIMEOUT_S = 60.0
# With the scheduler at a time, as a multiple of what all groups compute at a time: enough that none of them waits for this client.
WINDOW = 2


class Service:
    """One model and its session. It does not know who drives it: so it can end when that one is forgotten."""

    def __init__(self, backend: Backend, progress: StartupProgress) -> None:
        self.backend = backend
        self._pid = os.getpid()
        self._loop = BackgroundLoop()
        self._opened = contextlib.AsyncExitStack()
        try:
            self._loop.run(self._start(progress))
        except BaseException:
            self.close()
            raise

    @property
    def is_own(self) -> bool:
        """Whether this process made it. One that was forked since has a copy without its thread, for which nothing would ever come."""
        return os.getpid() == self._pid

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns or raises, on the loop. Raises ServiceEnded instead when a service ends."""
        return self._loop.run(self.backend.unless_ended(work))

    def close(self) -> None:
        """Ends all, if it is this process's own."""
        if self.is_own:
            self._loop.run(self._stop())
            self._loop.close()

    async def files(self) -> list[ModelFile]:
        """Tokenizer, chat template and generation config, as the workers have them. Raises PeerLost."""
        request = pb.GenerationFilesRequest(fingerprint=self.description.fingerprint)
        try:
            return await files.receive(aiter(self._stub.Files(request, timeout=FILES_TIMEOUT_S)))
        except grpc.aio.AioRpcError as error:
            raise PeerLost(f"the scheduler: {in_words(error)}") from error

    async def _start(self, progress: StartupProgress) -> None:
        port = await self.backend.start(progress)
        self._stub = GenerationStub(await self._opened.enter_async_context(channel(f"{LOOPBACK}:{port}")))
        self.description = await self.backend.unless_ended(_described(self._stub))
        self.slots = sum(group.slots for group in self.backend.groups)
        self.session = Session(self._stub, WINDOW * self.slots)
        self._opened.push_async_callback(self.session.close)

    async def _stop(self) -> None:
        await self._opened.aclose()
        await self.backend.stop()


async def _described(stub: GenerationStub) -> pb.GenerationDescribeResponse:
    """What the scheduler tells of its model, once it can: the stream to a worker is there a moment before."""
    while True:
        try:
            return await stub.Describe(pb.GenerationDescribeRequest(protocol_version=PROTOCOL_VERSION), timeout=CONNECT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise PeerLost(f"the scheduler: {in_words(error)}") from error
        await asyncio.sleep(POLL_EVERY_S)
