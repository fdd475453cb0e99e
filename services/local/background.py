"""An event loop in a thread of its own: for an API that blocks, above connections and processes that must be served meanwhile."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Runs until `close`. Its thread is also the parent of the processes that it starts: they get SIGTERM when it ends."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="lockstep", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        self._stop = asyncio.Event()
        await self._stop.wait()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns or raises. Ctrl-C, which comes to the waiting thread, cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Ends the thread; what still runs on the loop is cancelled."""
        self._loop.call_soon_threadsafe(lambda: self._stop.set())
        self._thread.join()
