"""Which waiting request gets a slot next, and when: what it needs must be there, and nobody is passed over for ever.

A request that others are computing a prefix of waits for that prefix, so that a burst of equal prompts computes it once. One that
does not fit is passed over by others that do, at most `MAX_SKIPS` times; then nobody is admitted before it. And higher priorities go
first, but no more than `MAX_OVERTAKINGS` times in a row before the request that has waited longest.
"""

import heapq
from itertools import count
from typing import NamedTuple

import numpy as np

from services.scheduler.memory import Memory
from services.scheduler.radix import NOT_KNOWN, Prefix
from services.scheduler.requests import Request
from services.scheduler.slots import Slots, SlotState
from services.scheduler.waiting import WaitingQueue
from shared.protocol.plan import Int32s

MAX_SKIPS = 32
MAX_OVERTAKINGS = 16  # in a row, of the request that has waited longest by others of higher priority
LOOKAHEAD = 4  # requests that do not fit and are passed over in one plan
RETRY_PLANS = 16  # after which those that did not fit are looked at anew: others may have computed their prefix, or the reserve is smaller


class _Refusal(NamedTuple):
    """The situation in which nobody could be admitted. While no request comes and nothing is freed, hardly anybody can be later."""

    changes: int  # of the queue
    free_slots: int
    free_pages: int
    until: int  # the number of the plan that looks again


class Admissions:
    """Between `begin` and `end`, one plan is made."""

    def __init__(self, waiting: WaitingQueue, slots: Slots, memory: Memory, page_size: int) -> None:
        self._waiting, self._slots, self._memory = waiting, slots, memory
        self._page_size = page_size
        self._passed_over: list[Request] = []  # in this plan
        self._refused: _Refusal | None = None  # when nobody could be admitted
        self._plans = 0
        self._overtakings = 0
        self._followers: dict[int, list[tuple[int, int, Request]]] = {}  # by slot: a heap of (tokens they wait for, tie-breaker, request)
        self._tie_breaker = count()

    def begin(self, reserve: int, jump: bool) -> None:
        """reserve: pages to leave. jump: the plan overtakes others, so that pages which they write cannot be read."""
        self._reserve, self._jump = reserve, jump
        self._plans += 1

    def may_come(self) -> bool:
        """Whether `next` is worth asking."""
        if not len(self._waiting) or not self._slots.num_free:
            return False
        before = self._refused
        return (
            before is None
            or before.changes != self._waiting.changes
            or before.free_slots != self._slots.num_free
            or before.free_pages < self._memory.free
            or before.until <= self._plans
        )

    def next(self, most_tokens: int | None) -> tuple[Request, Int32s] | None:
        """The request to admit, which stays in the queue, and all of its tokens.

        most_tokens: of which it may have to compute; then the shortest goes first. None: the first in the queue, whatever its length.
        When it is the turn of the request that has waited longest, that one or none.
        """
        if not self.may_come():  # the last refusal stands
            return None
        while self.may_come() and len(self._passed_over) <= LOOKAHEAD:
            overtaken = self._overtakings >= MAX_OVERTAKINGS
            head = self._waiting.oldest() if overtaken else self._waiting.head()
            request = head if overtaken or most_tokens is None else self._waiting.shortest()
            if head is None or request is None:
                break
            if head.skips >= MAX_SKIPS:
                request = head
            ids = request.prefill_ids
            prefix = NOT_KNOWN if request.needs_scores else self._memory.cache.lookup(request.cache_salt, ids)
            if self._follows(request, ids, prefix):
                continue
            if most_tokens is not None and len(ids) - prefix.num_pages * self._page_size > most_tokens:
                return None
            cannot = self._jump and prefix.num_pages > self._memory.cache.lookup(request.cache_salt, ids, confirmed_only=True).num_pages
            if cannot or self._memory.cost(prefix, len(ids), request.max_length) > self._memory.free - self._reserve:
                if request.skips >= MAX_SKIPS:
                    break
                self._waiting.set_aside(request)
                self._passed_over.append(request)
                continue
            for other in {head, *self._passed_over} - {request}:
                other.skips += 1
            oldest = self._waiting.oldest()
            self._overtakings = self._overtakings + 1 if oldest is not None and oldest.priority < request.priority else 0
            return request, ids
        if not self._jump:
            self._refused = _Refusal(self._waiting.changes, self._slots.num_free, self._memory.free, self._plans + RETRY_PLANS)
        return None

    def end(self) -> None:
        """The plan is made."""
        for request in self._passed_over:
            self._waiting.put_back(request)
        self._passed_over.clear()

    def on_written(self, slot: int) -> None:
        """A plan brings the slot further: who waits for it may come now."""
        followers = self._followers.get(slot)
        while followers and followers[0][0] <= self._slots.planned[slot]:
            self._release(heapq.heappop(followers)[-1])
        if followers is not None and not followers:
            del self._followers[slot]

    def on_left(self, slot: int) -> None:
        """The slot gets no further rows: nobody waits for it any more."""
        for *_, request in self._followers.pop(slot, ()):
            self._release(request)

    def _follows(self, request: Request, ids: Int32s, prefix: Prefix) -> bool:
        """Sets the request aside until the slot that is computing its prefix has done so."""
        writer = self._memory.cache.writer(prefix, ids)
        theirs = self._slots.ids[writer] if writer is not None and self._slots.state[writer] == int(SlotState.PREFILL) else None
        if writer is None or theirs is None:
            return False
        length = min(len(ids), len(theirs)) - 1
        common = int(np.argmin(np.append(ids[:length] == theirs[:length], False))) // self._page_size * self._page_size
        if common <= self._slots.planned[writer]:
            return False
        self._waiting.set_aside(request)
        heapq.heappush(self._followers.setdefault(writer, []), (common, next(self._tie_breaker), request))
        return True

    def _release(self, request: Request) -> None:
        self._waiting.put_back(request)
        self._refused = None
