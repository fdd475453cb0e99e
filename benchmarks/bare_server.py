"""`python -m benchmarks.bare_server STEP_MS`: streams events at the pace of one clock, and does nothing else. It prints its port."""

import asyncio
import json
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
import uvloop

EVENT = b"data: " + b"x" * 230 + b"\n\n"  # as long as the gateway's chunk of a token

Send = Callable[[dict[str, Any]], Awaitable[None]]


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
    async def serve() -> None:
        app = BareApplication(float(sys.argv[1]) / 1e3)
        config = uvicorn.Config(app, loop="none", http="httptools", lifespan="off", access_log=False, log_level="warning")
        with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
            print(listener.getsockname()[1], flush=True)
            await uvicorn.Server(config).serve(sockets=[listener])

    uvloop.run(serve())


if __name__ == "__main__":
    main()
