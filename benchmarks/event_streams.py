"""A client of very many streams at once: it counts events and decodes none, since it must cost less than the server."""

import asyncio
import json
from typing import cast

from benchmarks.stack import port_of


class Stream(asyncio.Protocol):
    """One stream: `ended` is done when its last event has come, and fails when it breaks off before."""

    def __init__(self, request: bytes) -> None:
        self.events = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's, which is none by its class
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: ")
        self._tail = (self._tail + data)[-100:]
        if b"[DONE]" in self._tail:
            self._transport.close()
            if not self.ended.done():
                self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError(f"a stream broke off after {self.events} events: {self._tail!r}"))


def request_of(model: str, tokens: int, n: int = 1) -> bytes:
    """The bytes that ask for a stream of so many tokens, of `n` choices."""
    body = json.dumps({"model": model, "prompt": "hi", "max_tokens": tokens, "n": n, "ignore_eos": True, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: benchmark\r\nContent-Type: application/json"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def opened(url: str, request: bytes) -> Stream:
    """A stream that has begun."""
    _, stream = await asyncio.get_running_loop().create_connection(lambda: Stream(request), "127.0.0.1", port_of(url))
    return stream
