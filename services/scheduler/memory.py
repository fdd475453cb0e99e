"""The pages of a group as its requests see them: what is free, what is promised, who gets the next one.

An admitted request is promised the pages of its prompt and one more, so that it comes on by a page whatever the others do; what it
needs beyond is there, or is made by evicting from the prefix cache, or it pauses until another request gives way.
"""

import numpy as np

from services.scheduler.pages import PagePool, PageState
from services.scheduler.prefix_cache import NoCache, PrefixCache, RadixCache
from services.scheduler.radix import Prefix
from services.scheduler.slots import Rows, Slots
from services.scheduler.steps import add_grants
from shared.protocol.plan import Int32s, Limits, Plan

MOST_RESERVED = 4  # a quarter of the pages


class Memory:
    """The pool, the prefix cache over it, and promises."""

    def __init__(self, limits: Limits, slots: Slots, prefix_cache: bool) -> None:
        self.pool = PagePool(limits.pages)
        self.cache: PrefixCache = RadixCache(self.pool, limits.page_size) if prefix_cache else NoCache(self.pool)
        self.promised = 0  # pages that running requests will still be granted, whatever happens
        self._slots = slots
        self._page_size = limits.page_size
        self._usable = limits.pages - 1
        self._plenty = max(limits.slots, self._usable // MOST_RESERVED)

    @property
    def free(self) -> int:
        """Pages that are there for whoever asks first."""
        return self.pool.num_ready + self.cache.evictable_pages - self.promised

    def state(self) -> dict[str, int]:
        """Pages by state, for the metrics."""
        return {state.name.lower(): self.pool.count(state) for state in PageState if state != PageState.SCRATCH}

    @property
    def usage(self) -> float:
        """Share of the pages that is in use, 0 to 1; what could be evicted is not."""
        return 1 - (self.pool.num_ready + self.cache.evictable_pages) / self._usable

    @property
    def is_plentiful(self) -> bool:
        """Whether a page for every slot and the largest reserve are free: nothing to count then."""
        return self.free >= self._plenty

    def reserve(self, rows: int, tokens: float) -> int:
        """Pages to keep for so many rows, each of which may write `tokens` before a page that is given back now is here."""
        return min(rows * -int(-tokens // self._page_size), self._usable // MOST_RESERVED)

    def cost(self, prefix: Prefix, length: int, max_length: int) -> int:
        """Free pages that the admission of a request of `length` tokens takes."""
        return self._promise(length, max_length) - prefix.num_pages + prefix.num_unused

    def admit(self, slot: int, namespace: str, ids: Int32s, reuse: bool = True) -> Int32s:
        """Promises pages to a slot admitted now. Returns those that it need not compute."""
        slots = self._slots
        pages = self.cache.open(slot, namespace, ids, reuse)
        slots.add_prefix(slot, pages)
        slots.promised[slot] = self._promise(len(ids), int(slots.max_length[slot]))
        self.promised += int(slots.promised[slot]) - len(pages)
        return pages

    def affordable(self, rows: Rows, beyond: Int32s) -> Rows:
        """Those of these slots that can have the pages, at most one each, that they need `beyond` what they were promised: those that
        came first, first."""
        if int(beyond.sum()) <= self.free:
            return rows
        order = np.argsort(self._slots.arrived_at[rows], kind="stable")
        fits = np.empty(len(rows), dtype=np.bool_)
        fits[order] = np.cumsum(beyond[order]) <= self.free
        fits |= beyond == 0  # what was promised is there, whoever waits
        return rows[fits]

    def beyond(self, rows: Rows, written: Int32s) -> Int32s:
        """Pages that each of these slots needs, and was not promised, to write `written` tokens."""
        have = np.maximum(self._slots.num_pages[rows], self._slots.promised[rows])
        return np.maximum(-(-written // self._page_size) - have, 0)

    def grant(self, plan: Plan, rows: Rows, written: Int32s, passed: int) -> None:
        """Gives these slots the pages to write `written` tokens, by this plan. passed: the id up to which every plan has."""
        slots = self._slots
        owners, indexes = slots.missing_pages(rows, written)
        if not len(owners):
            return
        self.cache.evict(len(owners) - self.pool.num_ready, passed)
        pages = self.pool.grant(owners)
        slots.add_pages(owners, indexes, pages)
        self.promised -= int(np.count_nonzero(indexes < slots.promised[owners]))
        add_grants(plan, owners.astype(np.int32), indexes.astype(np.int32), pages)

    def end_promise(self, slot: int) -> None:
        """The slot gets no further pages."""
        self.promised -= max(int(self._slots.promised[slot] - self._slots.num_pages[slot]), 0)
        self._slots.promised[slot] = 0

    def _promise(self, length: int, max_length: int) -> int:
        """The last token of a request is never written to the cache."""
        return -(-min(length + self._page_size, max_length - 1) // self._page_size)
