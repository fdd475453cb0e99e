"""The pages of one group's KV cache: who may write which."""

import heapq
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

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
    OWNED = 2  # by one slot, which alone writes and reads it
    PENDING = 3  # in the prefix cache, but the plan that writes it has not been confirmed; its owner is the slot that writes it
    CACHED = 4  # in the prefix cache, which counts its users; nobody writes it
    COOLING = 5  # given back, but plans still outstanding may touch it


class PagePool:
    """Pages are numbered in int32, and indexed as intp: numpy takes ten times as long with any other.

    READY -grant-> OWNED -share-> PENDING -confirm-> CACHED; from each of the three -cool-> COOLING -pass_to-> READY.

    There is no other way to READY: a plan sent ahead may still write or read a page whose request has ended, so the page cools until
    that plan has passed.
    """

    def __init__(self, num_pages: int) -> None:
        self.state = np.full(num_pages, PageState.READY, dtype=np.int8)
        self.state[SCRATCH_PAGE] = PageState.SCRATCH
        self.owner = np.full(num_pages, NO_SLOT, dtype=np.int32)
        self._ready = np.arange(num_pages - 1, SCRATCH_PAGE, -1)  # a stack, of which the first num_ready count
        self.num_ready = num_pages - 1
        self.num_cooling = 0
        self._passed = -1
        self._cooling: list[tuple[int, int, NDArray[np.intp]]] = []  # a heap of (last plan that may touch them, tie-breaker, pages)
        self._num_cooled = 0  # breaks ties in the heap

    def grant(self, slots: NDArray[np.integer]) -> Int32s:
        """One ready page for each entry of `slots`, which owns it. Raises OutOfPages, and takes none, when there are too few."""
        if len(slots) > self.num_ready:
            raise OutOfPages(f"{len(slots)} pages wanted, {self.num_ready} ready")
        self.num_ready -= len(slots)
        pages = self._ready[self.num_ready : self.num_ready + len(slots)]
        self.state[pages] = PageState.OWNED
        self.owner[pages] = slots
        return pages.astype(np.int32)

    def share(self, slot: int, pages: Int32s, *, written: bool) -> None:
        """Pages of `slot` enter the prefix cache. written: else a plan now on its way does so."""
        indexes = self._expect(pages, PageState.OWNED, slot)
        self.state[indexes] = PageState.CACHED if written else PageState.PENDING
        if written:
            self.owner[indexes] = NO_SLOT

    def confirm(self, pages: Int32s) -> None:
        """The plan that wrote these pending pages has passed."""
        indexes = self._expect(pages, PageState.PENDING)
        self.state[indexes] = PageState.CACHED
        self.owner[indexes] = NO_SLOT

    def cool(self, slot: int, pages: Int32s, last_plan: int) -> None:
        """Takes back pages of `slot` that no plan after `last_plan` touches. Raises InvariantError when it does not own them."""
        self._cool(self._expect(pages, PageState.OWNED, slot), last_plan)

    def evict(self, pages: Int32s, last_plan: int) -> None:
        """Takes back pages of the prefix cache that no plan after `last_plan` touches."""
        indexes = pages.astype(np.intp)
        state = self.state[indexes]
        wrong = (state != int(PageState.CACHED)) & (state != int(PageState.PENDING))
        if np.count_nonzero(wrong):
            raise InvariantError(f"pages {pages[wrong]} are not in the prefix cache")
        self._cool(indexes, last_plan)

    def pass_to(self, plan: int) -> None:
        """Every plan up to `plan` has passed: its result is in, and that of every plan before it."""
        self._passed = plan
        while self._cooling and self._cooling[0][0] <= plan:
            pages = heapq.heappop(self._cooling)[-1]
            self.state[pages] = PageState.READY
            self._ready[self.num_ready : self.num_ready + len(pages)] = pages
            self.num_ready += len(pages)
            self.num_cooling -= len(pages)

    def count(self, state: PageState) -> int:
        return int(np.count_nonzero(self.state == state))

    def check(self) -> None:
        """Raises InvariantError unless states, owners and lists agree. For tests; walks all pages."""
        ready = self._ready[: self.num_ready]
        cooling = np.concatenate([pages for *_, pages in self._cooling] or [ready[:0]])
        for name, pages, state in (("ready", ready, PageState.READY), ("cooling", cooling, PageState.COOLING)):
            if not np.array_equal(np.sort(pages), np.flatnonzero(self.state == state)):
                raise InvariantError(f"the list of {name} pages and the pages' states differ")
        if (len(ready), len(cooling)) != (self.num_ready, self.num_cooling):
            raise InvariantError("a number of pages is not the length of their list")
        if not np.array_equal(self.owner != NO_SLOT, (self.state == PageState.OWNED) | (self.state == PageState.PENDING)):
            raise InvariantError("a page has an owner and none that may write it, or the reverse")
        if self.state[SCRATCH_PAGE] != PageState.SCRATCH or self.count(PageState.SCRATCH) != 1:
            raise InvariantError("page 0 alone is the scratch page")

    def _cool(self, pages: NDArray[np.intp], last_plan: int) -> None:
        self.state[pages] = PageState.COOLING
        self.owner[pages] = NO_SLOT
        heapq.heappush(self._cooling, (last_plan, self._num_cooled, pages))
        self._num_cooled += 1
        self.num_cooling += len(pages)
        self.pass_to(self._passed)

    def _expect(self, pages: Int32s, state: PageState, owner: int | None = None) -> NDArray[np.intp]:
        """Returns the pages as indexes. Raises InvariantError unless all are in that state, and its owner's if there is one."""
        indexes = pages.astype(np.intp)
        wrong = self.state[indexes] != int(state)  # with an enum, numpy takes ten times as long
        if owner is not None:
            wrong |= self.owner[indexes] != owner
        if np.count_nonzero(wrong):
            raise InvariantError(f"pages {pages[wrong]} are not {state.name}" + (f" of slot {owner}" if owner is not None else ""))
        return indexes
