"""What both ends of every gRPC connection agree on: sizes, keepalive, protocol versions, heartbeats."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from shared.addresses import host_port
from shared.errors import LockstepError, PeerLost, ProtocolError
from shared.tls import channel_credentials, server_credentials

PROTOCOL_VERSION = "1.0"

HEARTBEAT_S = 0.5  # a side that has sent nothing for this long sends a heartbeat
SILENCE_S = 2.0  # a stream without any message for this long is dead
LATE_S = 0.25  # an event loop that runs a timer this late was busy, and says nothing of its peers
CONNECT_S = 5.0

MAX_MESSAGE_BYTES = 8 << 20  # a prompt of a million ids is 4 MB
MAX_UNSENT_MESSAGES, UNREAD_S = 10_000, 2.0  # a peer that leaves so many unread, the first of them for so long, does not read

_COMMON_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Ours are long-lived streams with heartbeats; these pings only find dead connections between calls.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection: no back-off inherited from another
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
)
SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second listener
)

Context = grpc.aio.ServicerContext[Any, Any]  # of a call, at the side that answers it

M = TypeVar("M")


class StreamEnded(PeerLost):
    """The other side ended the stream, broke off, or fell silent."""


def in_words(error: grpc.aio.AioRpcError) -> str:
    """Status and details of a call that failed."""
    return f"{error.code().name.lower()}: {error.details()}"


def check_version(theirs: str, peer: str) -> None:
    """Raises ProtocolError, naming both, when the major numbers differ."""
    if theirs.split(".")[0] != PROTOCOL_VERSION.split(".")[0]:
        raise ProtocolError(f"{peer} speaks protocol {theirs or '(none)'}, we speak {PROTOCOL_VERSION}: upgrade the older one")


class Outbox(Generic[M]):
    """What one side of a stream has to send: put at once from anywhere, sent by the one task that iterates.

    A heartbeat is sent when nothing else was for HEARTBEAT_S. The reader of the stream never waits for this writer.
    """

    def __init__(self, heartbeat: Callable[[], M], take: Callable[[deque[M]], M] = deque.popleft) -> None:
        """take: the next message from those that are queued, of which it may make one."""
        self._heartbeat, self._take = heartbeat, take
        self._messages: deque[M] = deque()
        self._put_at: deque[float] = deque()  # when each of these was put, in seconds
        self._wake = asyncio.Event()
        self._closed = False
        self._error: LockstepError | None = None

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: M) -> None:
        """Queues a message; one that comes after `close` is dropped. A peer that does not read ends the stream.

        However many are put at once, the writer has its time to send them.
        """
        if self._closed:
            return
        now = time.monotonic()
        if len(self._messages) >= MAX_UNSENT_MESSAGES and now - self._put_at[0] >= UNREAD_S:
            self.close(PeerLost(f"the peer has left {len(self._messages)} messages unread"))
            return
        self._messages.append(message)
        self._put_at.append(now)
        self._wake.set()

    def close(self, error: LockstepError | None = None) -> None:
        """Ends the iteration after what is queued, or at once with an error."""
        self._closed = True
        self._error = error
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[M]:
        loop = asyncio.get_running_loop()
        while True:
            if self._error is not None:
                raise self._error
            if self._messages:
                message = self._take(self._messages)
                while len(self._put_at) > len(self._messages):
                    self._put_at.popleft()
                yield message
                continue
            if self._closed:
                return
            self._wake.clear()
            timer = loop.call_later(HEARTBEAT_S, self._wake.set)
            await self._wake.wait()
            timer.cancel()
            if not self._messages and not self._closed:
                yield self._heartbeat()


async def received(stream: AsyncIterator[M], peer: str, silence_s: float = SILENCE_S) -> AsyncGenerator[M, None]:
    """The messages of a stream. Raises StreamEnded, saying why, when the peer breaks off or is silent for `silence_s`.

    Returns when the peer ends the stream in good order.
    """
    messages = aiter(stream)
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def expire(timeout: asyncio.Timeout, due: float) -> None:
        nonlocal timer
        if loop.time() - due > LATE_S:  # it was we who were not listening: what was sent meanwhile has not been read
            timer = loop.call_later(silence_s, expire, timeout, loop.time() + silence_s)
        else:
            timeout.reschedule(loop.time())

    while True:
        try:
            async with asyncio.timeout(None) as timeout:
                timer = loop.call_later(silence_s, expire, timeout, loop.time() + silence_s)
                try:
                    message = await anext(messages)
                finally:
                    timer.cancel()
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise StreamEnded(f"{peer} sent nothing for {silence_s:g} s") from error
        except grpc.aio.AioRpcError as error:
            raise StreamEnded(f"{peer}: {in_words(error)}") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # It is the call, not we: grpc cancels one whose messages to the peer end with an error, as those of a full outbox do.
            raise StreamEnded(f"{peer}: the call was cancelled on this side, as it is when messages go unread") from error
        yield message


@contextlib.asynccontextmanager
async def channel(target: str, tls: Path | None = None, name: str | None = None) -> AsyncIterator[grpc.aio.Channel]:
    """A channel of our options to `host:port`, with the certificates of a folder (see `shared.tls`) or in the clear.

    name: what the peer's certificate must name, where that is not the host.
    """
    if tls is None:
        opening = grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    else:
        named = (("grpc.ssl_target_name_override", name),) if name is not None else ()
        opening = grpc.aio.secure_channel(target, channel_credentials(tls), options=(*CHANNEL_OPTIONS, *named))
    async with opening as opened:
        yield opened


async def start_server(server: grpc.aio.Server, host: str, port: int, tls: Path | None = None) -> int:
    """Binds and starts; port 0 lets the kernel pick. Returns the port. Raises LockstepError when it is taken."""
    address = host_port(host, port)
    try:
        bound = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, server_credentials(tls))
    except RuntimeError as error:
        raise LockstepError(f"port: cannot listen on {host}:{port}: {error}") from error
    if not bound:
        raise LockstepError(f"port: cannot listen on {host}:{port}; is it in use?")
    await server.start()
    return int(bound)
