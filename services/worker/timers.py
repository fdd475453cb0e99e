"""Callbacks at exact times on an event loop, by a timerfd: loops round their own timers to milliseconds, and the kernel adds slack."""

import asyncio
import ctypes
import heapq
import os
import struct
import time
from collections.abc import Callable
from itertools import count

_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1  # linux/timerfd.h
_ITIMERSPEC = struct.Struct("@qqqq")  # interval and time, seconds and nanoseconds


def now_us() -> int:
    return time.monotonic_ns() // 1000


class Timers:
    """Times are microseconds of the monotonic clock. While a callback runs, the time is when it was due, however late it is: what
    follows from it begins then, so lateness does not add up."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_FLAGS)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = count()
        self._now_us: int | None = None  # while a callback runs
        asyncio.get_running_loop().add_reader(self._descriptor, self._on_time)

    def close(self) -> None:
        """No callback comes any more."""
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._due.clear()

    def now_us(self) -> int:
        return now_us() if self._now_us is None else self._now_us

    def at(self, due_us: int, callback: Callable[[], None]) -> None:
        heapq.heappush(self._due, (due_us, next(self._numbers), callback))
        if self._due[0][0] == due_us and self._now_us is None:
            self._arm()

    def catch_up(self) -> None:
        """Runs what is due, so that what comes from outside comes after it."""
        if self._now_us is not None:
            return  # a callback called something that asks for this
        try:
            while self._due and self._due[0][0] <= now_us():
                self._now_us, _, callback = heapq.heappop(self._due)
                callback()
        finally:
            self._now_us = None
        self._arm()

    def _on_time(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return  # it was armed anew meanwhile
        self.catch_up()

    def _arm(self) -> None:
        if self._due:
            seconds, us = divmod(max(self._due[0][0], 1), 1_000_000)
            when = _ITIMERSPEC.pack(0, 0, seconds, us * 1000)
            if self._libc.timerfd_settime(self._descriptor, _TFD_TIMER_ABSTIME, when, None):
                raise OSError(ctypes.get_errno(), "timerfd_settime failed")
