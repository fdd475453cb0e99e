"""The slots of one group: what the scheduler knows of each row of the device's state, as arrays by slot.

The device is ahead of what the scheduler has seen and behind what it has planned: `confirmed` and `planned` bound its length.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from services.scheduler.requests import Request
from shared.protocol.plan import Int32s, Limits


class SlotState(IntEnum):
    FREE = 0
    PREFILL = 1  # part of its prefill has not been planned
    DECODE = 2  # all of its prefill has been planned
    LEAVING = 3  # gets no further rows, but what its plans bring counts: it is preempted once the last one has passed
    RETIRED = 4  # gets no further rows; free once its last plan has passed


Rows = NDArray[np.intp]  # slots, as indexes: numpy takes ten times as long with any other type

_NO_ENTRIES = np.empty(0, dtype=np.intp)
_NOT_RUNNING = -(1 << 40)  # no epoch, which is an int32


class Slots:
    """Structure of arrays; nothing here is decided, only kept."""

    def __init__(self, limits: Limits, highest_epoch: int) -> None:
        count = limits.slots
        self._page_size = limits.page_size
        self.state = np.zeros(count, dtype=np.int8)
        self.epoch = np.full(count, highest_epoch, dtype=np.int32)  # of this use of the slot; grows with each
        self.running_epoch = np.full(count, _NOT_RUNNING, dtype=np.int64)  # the same while a request has the slot
        self.target = np.zeros(count, dtype=np.int32)  # tokens to prefill
        self.confirmed = np.zeros(count, dtype=np.int32)  # tokens of the sequence that the scheduler has
        self.planned = np.zeros(count, dtype=np.int32)  # tokens that it has at most once every plan sent has run
        self.max_length = np.zeros(count, dtype=np.int32)
        self.decodes_below = np.zeros(count, dtype=np.int32)  # planned tokens, in state DECODE the greatest length; else 0
        self.last_plan = np.full(count, -1, dtype=np.int64)  # id of the last plan that names the slot
        self.arrived_at = np.zeros(count)  # seconds, of the request
        self.taken_at = np.zeros(count)  # seconds: when the request got the slot
        self.tenant = np.zeros(count, dtype=np.intp)  # index
        self.promised = np.zeros(count, dtype=np.int32)  # pages in all that it will have, whatever happens
        self.secure_until = np.zeros(count, dtype=np.int32)  # tokens; it is not preempted before it has confirmed them
        self.last_token_at = np.full(count, np.nan)  # seconds; NaN before the first of this use of the slot
        self.page_table = np.zeros((count, limits.pages_per_slot), dtype=np.int32)
        self.num_pages = np.zeros(count, dtype=np.int32)  # granted
        self.requests: NDArray[np.object_] = np.full(count, None)  # Request, or None
        self.endings = np.zeros(limits.vocab_size, dtype=np.int32)  # how many of these requests may end with an id
        self.plain_below = np.zeros(count, dtype=np.int32)  # tokens; with so many, or an ending, a request is looked at by itself
        self.ids: list[Int32s | None] = [None] * count  # to prefill; of a retired slot: worth keeping in the prefix cache
        self._free = list(range(count - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def admit(self, request: Request, ids: Int32s) -> int:
        """Takes a free slot, of which there must be one, for a request that will prefill `ids`."""
        slot = self._free.pop()
        self.state[slot] = SlotState.PREFILL
        self.epoch[slot] += 1
        self.running_epoch[slot] = self.epoch[slot]
        self.target[slot] = self.confirmed[slot] = len(ids)
        self.planned[slot] = 0
        self.max_length[slot] = request.max_length
        self.plain_below[slot] = 0
        self.arrived_at[slot] = request.arrived_at
        self.last_token_at[slot] = np.nan
        self.requests[slot] = request
        self.ids[slot] = ids
        self._count_endings(request, 1)
        return slot

    def decode(self, slot: int) -> None:
        """All of its prefill has been planned."""
        self.state[slot] = SlotState.DECODE
        self.decodes_below[slot] = self.max_length[slot]

    def first_token(self, slot: int) -> None:
        """What follows is plain, unless somebody wants to know more of it."""
        if self.request(slot).scores is None:
            self.plain_below[slot] = self.decodes_below[slot]  # 0 when it is leaving

    def leave(self, slot: int) -> None:
        """No further rows; what is on its way for the request is looked at by itself."""
        self.state[slot] = SlotState.LEAVING
        self.decodes_below[slot] = self.plain_below[slot] = 0

    def retire(self, slot: int, ids: Int32s) -> None:
        """The request has left; `ids` are worth keeping."""
        self._count_endings(self.request(slot), -1)
        self.state[slot] = SlotState.RETIRED
        self.decodes_below[slot] = 0
        self.running_epoch[slot] = _NOT_RUNNING
        self.requests[slot] = None
        self.ids[slot] = ids

    def free(self, slot: int) -> None:
        """The way back of a slot whose pages are gone."""
        self.state[slot] = SlotState.FREE
        self.num_pages[slot] = 0
        self.ids[slot] = None
        self._free.append(slot)

    def request(self, slot: int) -> Request:
        """Of a slot that has one."""
        request: Request | None = self.requests[slot]
        assert request is not None
        return request

    def running(self) -> Rows:
        """The slots that have a request, which may still get tokens."""
        running: Rows = (self.running_epoch != _NOT_RUNNING).nonzero()[0]
        return running

    def pages(self, slot: int) -> Int32s:
        """A copy of the slot's page table, as far as it is granted."""
        return self.page_table[slot, : self.num_pages[slot]].copy()

    def may_decode(self) -> Rows:
        """The slots that may have a decode row: none that could grow past its greatest length."""
        return (self.planned < self.decodes_below).nonzero()[0]

    def missing_pages(self, slots: Rows, written: Int32s) -> tuple[Rows, NDArray[np.intp]]:
        """The page-table entries (slots `[G]`, indexes `[G]`) that `slots` lack to write `written` tokens each."""
        lack = (self.num_pages[slots] * self._page_size < written).nonzero()[0]
        if not len(lack):
            return _NO_ENTRIES, _NO_ENTRIES
        slots, written = slots[lack], written[lack]
        have = self.num_pages[slots].astype(np.intp)
        counts = -(-written // self._page_size) - have
        if len(lack) == counts.sum():  # one each, as in every step of decode rows
            return slots, have
        first: Rows = counts.cumsum() - counts - have
        return slots.repeat(counts), np.arange(counts.sum(), dtype=np.intp) - first.repeat(counts)

    def add_prefix(self, slot: int, pages: Int32s) -> None:
        """Enters pages that a slot admitted just now need not compute."""
        self.page_table[slot, : len(pages)] = pages
        self.num_pages[slot] = len(pages)
        self.planned[slot] = len(pages) * self._page_size

    def add_pages(self, slots: Rows, indexes: NDArray[np.intp], pages: Int32s) -> None:
        """Enters granted pages."""
        self.page_table[slots, indexes] = pages
        self.num_pages[slots] = indexes + 1  # of several entries of a slot the last counts

    def _count_endings(self, request: Request, by: int) -> None:
        for token in request.ending_ids:
            if token < len(self.endings):
                self.endings[token] += by
