"""How many tokens one gateway process streams, beside a bare uvicorn application that sends as much at the same pace.

Both get the same load: so many streams, of each of which a step brings one token. The bare application does nothing but write an event of
the same size for each, so its cost is what HTTP costs in this process model.
"""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import psutil
import uvloop

from benchmarks.gateway import DELAY, difference, histograms, quantile
from benchmarks.report import Report, Value
from benchmarks.stack import scripted_stack

EVENT = b"data: " + b"x" * 230 + b"\n\n"  # as long as the gateway's chunk of a token
WARM_UP_TOKENS = 20
MAX_LENGTH = 100_000

Send = Callable[[dict[str, Any]], Awaitable[None]]


def streaming(streams: int, step_ms: float, tokens: int) -> Report:
    """`streams` at once, of `tokens` each, at one token a stream every `step_ms`."""
    rows: list[tuple[Value, ...]] = []
    with _bare(step_ms) as (url, pid):
        uvloop.run(_load(url, "bare", streams, WARM_UP_TOKENS))
        loaded = _measured(pid, lambda: _load(url, "bare", streams, tokens))
        rows.append(("bare uvicorn", *loaded.figures(), None, None))
    script = {"step_s": step_ms / 1e3, "default": {"ids": [40, 41, 42, 43], "repeat": True}}
    with scripted_stack(script, MAX_LENGTH, worker_max_num_seqs=streams) as running:
        pid = listener(running.url)
        uvloop.run(_load(running.url, running.model, streams, WARM_UP_TOKENS))
        before = histograms(running)[DELAY]
        served = _measured(pid, lambda: _load(running.url, running.model, streams, tokens))
        delay = difference(histograms(running)[DELAY], before)
        rows.append(("gateway", *served.figures(), quantile(delay, 0.5) * 1e3, quantile(delay, 0.99) * 1e3))
    share, cost = served.rate / loaded.rate, loaded.cpu_s / loaded.tokens / (served.cpu_s / served.tokens)
    return Report(
        name="streaming",
        columns=("server", "tokens/s", "events/s", "CPU", "tokens per CPU s", "delay p50, ms", "delay p99, ms"),
        rows=rows,
        notes=(
            f"{streams} streams of {tokens} tokens, a token each every {step_ms:g} ms: {streams / step_ms * 1e3:,.0f} a second.",
            f"gateway / bare: {share:.2f} of the tokens/s, {cost:.2f} of the tokens per CPU second. All processes share the cores.",
            "CPU: of the server's process, 1 is a whole core. Tokens that come while an event waits are sent in one.",
        ),
    )


@dataclass
class Loaded:
    """What a load was, and what it cost its server."""

    tokens: int
    events: int
    seconds: float
    cpu_s: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def figures(self) -> tuple[float, ...]:
        return self.rate, self.events / self.seconds, self.cpu_s / self.seconds, self.tokens / self.cpu_s


def _measured(pid: int, load: Callable[[], Any]) -> Loaded:
    times = psutil.Process(pid).cpu_times
    before = times()
    loaded: Loaded = uvloop.run(load())
    after = times()
    loaded.cpu_s = after.user + after.system - before.user - before.system
    return loaded


class Stream(asyncio.Protocol):
    """A client that counts events and decodes none: it must cost less than the server."""

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


async def _load(url: str, model: str, streams: int, tokens: int) -> Loaded:
    start, request = time.monotonic(), request_of(model, tokens)
    open_streams = [await opened(url, request) for _ in range(streams)]
    await asyncio.gather(*(stream.ended for stream in open_streams))
    return Loaded(streams * tokens, sum(stream.events for stream in open_streams) - streams, time.monotonic() - start)


def port_of(url: str) -> int:
    """The port of a URL without a path."""
    return int(url.rsplit(":", 1)[1])


def listener(url: str) -> int:
    """The process that listens at the URL's port."""
    return next(
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.laddr and connection.laddr.port == port_of(url) and connection.status == psutil.CONN_LISTEN and connection.pid
    )


@contextlib.contextmanager
def _bare(step_ms: float) -> Iterator[tuple[str, int]]:
    """The bare application in a process of its own: its URL and process id."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.streaming", str(step_ms)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}", process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


class BareApplication:
    """Answers a request with as many events as it asks for, at the pace of one shared clock."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._steps = 0
        self._ticked = asyncio.Event()
        self._clock: asyncio.Task[None] | None = None

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Awaitable[dict[str, Any]]], send: Send) -> None:
        if self._clock is None:
            self._clock = asyncio.create_task(self._tick())
        asked = b""
        more = True
        while more:
            message = await receive()
            asked += message.get("body", b"")
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        first = self._steps
        for sent in range(json.loads(asked)["max_tokens"]):
            while self._steps - first <= sent:
                await self._ticked.wait()
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        while True:
            await asyncio.sleep(start + (self._steps + 1) * self._step_s - loop.time())
            self._steps += 1
            self._ticked.set()
            self._ticked = asyncio.Event()


def main() -> None:
    """Serves the bare application on a port that it prints."""

    async def serve() -> None:
        app = BareApplication(float(sys.argv[1]) / 1e3)
        import uvicorn  # not where the image of a GPU machine runs the other benchmarks

        config = uvicorn.Config(app, loop="none", http="httptools", lifespan="off", access_log=False, log_level="warning")
        with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
            print(listener.getsockname()[1], flush=True)
            await uvicorn.Server(config).serve(sockets=[listener])

    uvloop.run(serve())


if __name__ == "__main__":
    main()
