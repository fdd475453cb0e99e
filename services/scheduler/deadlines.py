"""Whose time is over: the deadlines of live requests, as a heap that does not outgrow them."""

import heapq
from collections.abc import Iterator
from itertools import count

from services.scheduler.requests import Request

SLACK = 64  # of requests that have ended, beside as many as there are


class Deadlines:
    """A client may allow hours and be answered in a second, so those of requests that have ended are cleared away from time to time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []  # (deadline, tie-breaker, request)
        self._added = count()
        self._most = SLACK  # entries, before they are looked through

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Of a request without one, nothing is kept."""
        if request.deadline is None:
            return
        heapq.heappush(self._heap, (request.deadline, next(self._added), request))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if entry[-1].end is None]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + SLACK

    def due(self, now: float) -> Iterator[Request]:
        """The requests whose deadline has passed, once each."""
        while self._heap and self._heap[0][0] <= now:
            *_, request = heapq.heappop(self._heap)
            if request.end is None:
                yield request
