"""The requests of a group, or of none yet, that wait for a slot."""

import heapq
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from services.scheduler.requests import Key, Request
from services.scheduler.tenants import Tenants

SLACK = 64  # entries that are out of date and left in the heaps, beside as many as there are requests

Rank = tuple[float, Key]  # by arrival, the same wherever the request waits, and again after a preemption
_Entry = tuple[int, Rank, int, Request]  # (length or 0, rank, tie-breaker, request)


class _Class(NamedTuple):
    """What goes before what, whoever asks. Interrupted requests come first: most of their clients are in the middle of a stream."""

    fresh: bool
    inverse_priority: int


class WaitingQueue:
    """Interrupted requests first, then by priority; within these, the tenant that has had the least; of it, first come first served.

    A request may be set aside, since it waits for something: it is not offered until it is put back.
    """

    def __init__(self, tenants: Tenants | None = None) -> None:
        self.tokens = 0  # to prefill
        self.changes = 0  # grows with whatever may change the answers
        self._tenants = tenants or Tenants()
        self._present: dict[Key, Request] = {}
        self._aside: set[Request] = set()
        self._classes: dict[_Class, _Tenants] = {}
        self._by_rank: list[tuple[Rank, int, Request]] = []  # a heap; some entries are out of date
        self._pushed = count()
        self._entries = 0

    def __len__(self) -> int:
        return len(self._present)

    def __iter__(self) -> Iterator[Request]:
        """In no order. Nothing may come or go meanwhile."""
        return iter(self._present.values())

    def push(self, request: Request) -> None:
        self._present[request.key] = request
        self.tokens += request.length
        self.changes += 1
        self._tenants.join(request.tenant)
        self._enter(request)

    def head(self) -> Request | None:
        """The next request, which stays."""
        return self._next(shortest=False)

    def shortest(self) -> Request | None:
        """Of the class and the tenant of the head, the one with the fewest tokens to prefill."""
        return self._next(shortest=True)

    def oldest(self) -> Request | None:
        """The one that came first, whatever its class and its tenant."""
        while self._by_rank:
            request = self._by_rank[0][-1]
            if self.offers(request):
                return request
            heapq.heappop(self._by_rank)
        return None

    def remove(self, request: Request) -> None:
        """Raises KeyError when it does not wait here."""
        del self._present[request.key]
        self._aside.discard(request)
        self.tokens -= request.length
        self.changes += 1
        self._tenants.leave(request.tenant)
        self._tidy()

    def set_aside(self, request: Request) -> None:
        """It goes on to wait, and is not offered."""
        self._aside.add(request)

    def put_back(self, request: Request) -> None:
        """Offers it again, if it was set aside."""
        if request in self._aside:
            self._aside.remove(request)
            self._enter(request)
            self._tidy()

    def drain(self) -> list[Request]:
        """Takes all, in order."""
        requests = sorted(self._present.values(), key=lambda request: (_class_of(request), rank(request)))
        for request in requests:
            self.remove(request)
        return requests

    def offers(self, request: Request) -> bool:
        return self._present.get(request.key) is request and request not in self._aside

    def _next(self, shortest: bool) -> Request | None:
        for key in sorted(self._classes):
            request = self._classes[key].next(self, shortest)
            if request is not None:
                return request
            del self._classes[key]
        return None

    def _enter(self, request: Request) -> None:
        kind = _class_of(request)
        tenants = self._classes.get(kind)
        if tenants is None:
            tenants = self._classes[kind] = _Tenants(self._tenants)
        tenants.push(request)
        heapq.heappush(self._by_rank, (rank(request), next(self._pushed), request))
        self._entries += 1

    def _tidy(self) -> None:
        """Clears away what is out of date, once it is too much."""
        if self._entries <= 2 * len(self._present) + SLACK:
            return
        self._classes.clear()
        self._by_rank.clear()
        self._entries = 0
        for request in self._present.values():
            if request not in self._aside:
                self._enter(request)


def rank(request: Request) -> Rank:
    return request.arrived_at, request.key


def _class_of(request: Request) -> _Class:
    return _Class(not request.interrupted, -request.priority)


class _Line:
    """The requests of one class and tenant, by arrival and by length; some entries are out of date."""

    def __init__(self) -> None:
        self._by_rank: list[_Entry] = []
        self._by_length: list[_Entry] = []
        self._pushed = count()

    def push(self, request: Request) -> None:
        place = rank(request)
        for heap, length in ((self._by_rank, 0), (self._by_length, request.length)):
            heapq.heappush(heap, (length, place, next(self._pushed), request))

    def next(self, queue: WaitingQueue, shortest: bool) -> Request | None:
        heap = self._by_length if shortest else self._by_rank
        while heap:
            request = heap[0][-1]
            if queue.offers(request):
                return request
            heapq.heappop(heap)
        return None


class _Tenants:
    """The tenants of one class, by what they have had. Counters only grow, so an entry that is out of date stands too early."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._lines: dict[str, _Line] = {}
        self._heap: list[tuple[int, str]] = []  # (tokens computed, tenant), one entry for each line

    def push(self, request: Request) -> None:
        line = self._lines.get(request.tenant)
        if line is None:
            line = self._lines[request.tenant] = _Line()
            heapq.heappush(self._heap, (self._tenants.computed(request.tenant), request.tenant))
        line.push(request)

    def next(self, queue: WaitingQueue, shortest: bool) -> Request | None:
        while self._heap:
            computed, tenant = self._heap[0]
            now = self._tenants.computed(tenant)
            if computed < now:
                heapq.heapreplace(self._heap, (now, tenant))
                continue
            request = self._lines[tenant].next(queue, shortest)
            if request is not None:
                return request
            heapq.heappop(self._heap)
            del self._lines[tenant]
        return None
