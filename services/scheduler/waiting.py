"""The requests of a group, or of none yet, that wait for a slot."""

import heapq
from itertools import count

from services.scheduler.requests import Key, Request

SLACK = 64  # entries of removed requests that are left in the heap, beside as many as there are requests


class WaitingQueue:
    """Resumed requests first, since their clients are in the middle of a stream; then by priority, then first come first served."""

    def __init__(self) -> None:
        self.tokens = 0  # to prefill
        self._arrivals = count()
        self._heap: list[tuple[bool, int, int, Request]] = []
        self._present: dict[Key, Request] = {}

    def __len__(self) -> int:
        return len(self._present)

    def push(self, request: Request) -> None:
        self._present[request.key] = request
        self.tokens += request.length
        heapq.heappush(self._heap, (not request.resumed_at, -request.priority, next(self._arrivals), request))

    def head(self) -> Request | None:
        """The next request, which stays."""
        while self._heap:
            request = self._heap[0][-1]
            if self._present.get(request.key) is request:
                return request
            heapq.heappop(self._heap)  # it was removed
        return None

    def remove(self, request: Request) -> None:
        """Raises KeyError when it does not wait here."""
        del self._present[request.key]
        self.tokens -= request.length
        if len(self._heap) > 2 * len(self._present) + SLACK:
            self._heap = [entry for entry in self._heap if self._present.get(entry[-1].key) is entry[-1]]
            heapq.heapify(self._heap)

    def drain(self) -> list[Request]:
        """Takes all, in order."""
        requests = [request for *_, request in sorted(self._heap) if self._present.get(request.key) is request]
        self._heap.clear()
        self._present.clear()
        self.tokens = 0
        return requests
