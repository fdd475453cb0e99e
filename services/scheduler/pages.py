"""The pages of one group's KV cache: who may write which."""

import heapq
from enum import IntEnum

import numpy as np

from shared.errors import LockstepError
from shared.protocol.plan import SCRATCH_PAGE, Int32s

NO_SLOT = -1


class InvariantError(LockstepError):
    """The scheduler's books contradict themselves: a defect, which must not reach a device."""


class OutOfPages(LockstepError):
    """Fewer pages are ready than are wanted."""


class PageState(IntEnum):
    """Exactly one per page."""

    SCRATCH = 0  # page 0, where done rows write
    READY = 1
    OWNED = 2  # by one slot, which alone writes it
    COOLING = 3  # given back, but plans still outstanding may touch it


class PagePool:
    """READY -grant-> OWNED -cool-> COOLING -pass_to-> READY; there is no other way to READY.

    A plan sent ahead may still write a page whose request has ended, so the page cools until that plan has passed.
    """

    def __init__(self, num_pages: int) -> None:
        self.state = np.full(num_pages, PageState.READY, dtype=np.int8)
        self.state[SCRATCH_PAGE] = PageState.SCRATCH
        self.owner = np.full(num_pages, NO_SLOT, dtype=np.int32)
        self._ready = np.arange(num_pages - 1, SCRATCH_PAGE, -1, dtype=np.int32)  # a stack, of which the first num_ready count
        self.num_ready = num_pages - 1
        self._cooling: list[tuple[int, int, Int32s]] = []  # a heap of (last plan that may touch them, tie-breaker, pages)
        self._num_cooled = 0  # breaks ties in the heap

    def grant(self, slots: Int32s) -> Int32s:
        """One ready page for each entry of `slots`, which owns it. Raises OutOfPages, and takes none, when there are too few."""
        if len(slots) > self.num_ready:
            raise OutOfPages(f"{len(slots)} pages wanted, {self.num_ready} ready")
        self.num_ready -= len(slots)
        pages = self._ready[self.num_ready : self.num_ready + len(slots)].copy()
        self.state[pages] = PageState.OWNED
        self.owner[pages] = slots
        return pages

    def cool(self, slot: int, pages: Int32s, last_plan: int) -> None:
        """Takes back pages of `slot` that no plan after `last_plan` touches. Raises InvariantError when it does not own them."""
        wrong = pages[(self.state[pages] != PageState.OWNED) | (self.owner[pages] != slot)]
        if len(wrong):
            raise InvariantError(f"pages {wrong} are not owned by slot {slot}")
        self.state[pages] = PageState.COOLING
        self.owner[pages] = NO_SLOT
        heapq.heappush(self._cooling, (last_plan, self._num_cooled, pages))
        self._num_cooled += 1

    def pass_to(self, plan: int) -> None:
        """Every plan up to `plan` has passed: its result is in, and that of every plan before it."""
        while self._cooling and self._cooling[0][0] <= plan:
            pages = heapq.heappop(self._cooling)[-1]
            self.state[pages] = PageState.READY
            self._ready[self.num_ready : self.num_ready + len(pages)] = pages
            self.num_ready += len(pages)

    def count(self, state: PageState) -> int:
        return int(np.count_nonzero(self.state == state))

    def check(self) -> None:
        """Raises InvariantError unless states, owners and lists agree. For tests; walks all pages."""
        ready = self._ready[: self.num_ready]
        cooling = np.concatenate([pages for *_, pages in self._cooling] or [ready[:0]])
        for name, pages, state in (("ready", ready, PageState.READY), ("cooling", cooling, PageState.COOLING)):
            if not np.array_equal(np.sort(pages), np.flatnonzero(self.state == state)):
                raise InvariantError(f"the list of {name} pages and the pages' states differ")
        if not np.array_equal(self.owner != NO_SLOT, self.state == PageState.OWNED):
            raise InvariantError("a page has an owner and is not owned, or the reverse")
        if self.state[SCRATCH_PAGE] != PageState.SCRATCH or self.count(PageState.SCRATCH) != 1:
            raise InvariantError("page 0 alone is the scratch page")
