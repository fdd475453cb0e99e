"""What API keys may use: requests and tokens a minute, and requests at a time, over all processes of a gateway.

Usage lies in one table in shared memory. A process writes its own rows only and reads everybody's, so nothing is locked and a process
that dies holds nobody up; two processes that decide in the same microsecond may let one request too many pass. A minute slides: what the
minute before used counts as much as it still overlaps with the last 60 seconds.
"""

import hashlib
import math
from multiprocessing.context import SpawnContext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.gateway.errors import Overloaded
from services.gateway.keys import MAX_KEYS, ApiKey

MINUTE_S = 60.0
NOBODY = 0

ROW = np.dtype(
    [
        ("key", "u8"),  # of the key's name; NOBODY: free
        ("running", "i8"),
        ("minute", "i8"),  # of the counts below, on the clock that all processes share
        ("requests", "i8"),
        ("requests_before", "i8"),  # in the minute before
        ("tokens", "i8"),
        ("tokens_before", "i8"),
    ]
)

Table = NDArray[np.void]


def shared_memory(context: SpawnContext, processes: int) -> Any:
    """Room for a table, to be handed to the processes that `context` starts."""
    return context.RawArray("b", processes * MAX_KEYS * ROW.itemsize)


class Limits:
    """The view of one process."""

    def __init__(self, memory: Any = None, process: int = 0) -> None:
        """memory: from `shared_memory`; None: this process is alone."""
        self._table: Table = np.zeros((1, MAX_KEYS), ROW) if memory is None else np.frombuffer(memory, ROW).reshape(-1, MAX_KEYS)
        self._own = self._table[process]
        self._own[:] = np.zeros(MAX_KEYS, ROW)  # of a process that was here before and died
        self._rows: dict[str, int] = {}

    def begin(self, key: ApiKey, now: float) -> None:
        """A request wants to begin. Raises Overloaded, with the time after which it may, when the key's limits forbid it.

        now: on the monotonic clock, in seconds.
        """
        rows = self._table[self._table["key"] == _identity(key.name)]
        if key.concurrent_requests is not None and rows["running"].sum() >= key.concurrent_requests:
            raise _refusal(f"this key may have {key.concurrent_requests} requests at a time", 1.0)
        for count, limit in (("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute)):
            if limit is not None and (wait_s := _wait_s(rows, count, limit, now)):
                raise _refusal(f"this key may have {limit} {count} a minute", wait_s)
        row = self._row(key.name, now)
        row["running"] += 1
        row["requests"] += 1

    def end(self, key: ApiKey, tokens: int, now: float) -> None:
        """A request that began has ended, after so many tokens of prompts and completions."""
        row = self._row(key.name, now)
        row["running"] -= 1
        row["tokens"] += tokens

    def _row(self, name: str, now: float) -> np.void:
        """This process' row of a key, at the present minute."""
        minute = int(now // MINUTE_S)
        if name not in self._rows:
            if len(self._rows) == MAX_KEYS:
                self._forget(minute)
            free = int(np.argmin(self._own["key"]))  # NOBODY is the smallest
            self._rows[name] = free
            self._own[free] = (_identity(name), 0, minute, 0, 0, 0, 0)
        row = self._own[self._rows[name]]
        if row["minute"] != minute:
            is_next = row["minute"] == minute - 1
            for count, before in (("requests", "requests_before"), ("tokens", "tokens_before")):
                row[before] = row[count] if is_next else 0
                row[count] = 0
            row["minute"] = minute
        return row  # type: ignore[no-any-return]

    def _forget(self, minute: int) -> None:
        """Frees the rows that mean nothing any more: keys come and go with their file, and each may have used the last minutes."""
        for name, index in list(self._rows.items()):
            row = self._own[index]
            if not row["running"] and row["minute"] < minute - 1:
                row["key"] = NOBODY
                del self._rows[name]
        if len(self._rows) == MAX_KEYS:
            raise _refusal("too many keys were used in the last minute", MINUTE_S)


def _identity(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") or 1


def _wait_s(rows: Table, count: str, limit: int, now: float) -> float:
    """In how many seconds the use of the last minute will be below the limit; 0: it is."""
    minute, passed = int(now // MINUTE_S), now % MINUTE_S / MINUTE_S
    is_current, is_last = rows["minute"] == minute, rows["minute"] == minute - 1
    current = int(rows[count][is_current].sum())
    before = int(rows[f"{count}_before"][is_current].sum() + rows[count][is_last].sum())
    if current + before * (1 - passed) < limit:
        return 0.0
    # In this minute, or in the next one, when what is current lies before.
    at = 1 - (limit - current) / before if current < limit else 2 - limit / current
    return max(at - passed, 1e-3) * MINUTE_S


def _refusal(message: str, wait_s: float) -> Overloaded:
    return Overloaded(f"{message}: try again later", code="rate_limit_exceeded", retry_after_s=max(math.ceil(wait_s), 1))
