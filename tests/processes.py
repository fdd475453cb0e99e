"""Waiting for facts, and for processes that must be gone."""

import asyncio
import inspect
import os
import time
import uuid
from collections.abc import Callable, Iterator

import psutil

POLL_S = 0.02
WITHIN_S = 30.0  # for what takes no time worth mentioning on an idle machine


def eventually(condition: Callable[[], object], within_s: float = WITHIN_S) -> None:
    """Waits for a fact, up to a deadline; a test never sleeps for a guess."""
    for _ in _polls(condition, within_s):
        time.sleep(POLL_S)


async def eventually_async(condition: Callable[[], object], within_s: float = WITHIN_S) -> None:
    """`eventually`, while the event loop runs on."""
    for _ in _polls(condition, within_s):
        await asyncio.sleep(POLL_S)


def _polls(condition: Callable[[], object], within_s: float) -> Iterator[None]:
    """One step each time that the fact is not there yet; fails at the deadline."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {within_s} s: {inspect.getsource(condition).strip()}"
        yield


class Family:
    """Every process started with `environment`, and whatever these start: found again when all links to them are lost."""

    VARIABLE = "TEST_PROCESS_FAMILY"

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self.environment = {**os.environ, self.VARIABLE: self._mark}

    def living(self) -> list[psutil.Process]:
        """Those that have not ended."""
        return [process for process in psutil.process_iter() if self._owns(process)]

    def end(self, within_s: float = WITHIN_S) -> None:
        """Fails unless all have ended within this time; those that have not are killed."""
        try:
            eventually(lambda: not self.living(), within_s)
        finally:
            for process in self.living():
                print(f"left over: {process}")
                process.kill()

    def _owns(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(self.VARIABLE) == self._mark
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # gone, a zombie, or somebody else's
            return False
