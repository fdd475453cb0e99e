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


_NOTHING = np.empty(0, dtype=np.int32)


class Slots:
    """Structure of arrays; nothing here is decided, only kept."""

    def __init__(self, limits: Limits, highest_epoch: int) -> None:
        count = limits.slots
        self._page_size = limits.page_size
        self.state = np.zeros(count, dtype=np.int8)
        self.epoch = np.full(count, highest_epoch, dtype=np.int32)  # of this use of the slot; grows with each
        self.target = np.zeros(count, dtype=np.int32)  # tokens to prefill
        self.confirmed = np.zeros(count, dtype=np.int32)  # tokens of the sequence that the scheduler has
        self.planned = np.zeros(count, dtype=np.int32)  # tokens that it has at most once every plan sent has run
        self.max_length = np.zeros(count, dtype=np.int32)
        self.last_plan = np.full(count, -1, dtype=np.int64)  # id of the last plan that names the slot
        self.arrived_at = np.zeros(count)  # seconds, of the request
        self.tenant = np.zeros(count, dtype=np.int32)  # index
        self.promised = np.zeros(count, dtype=np.int32)  # pages in all that it will have, whatever happens
        self.secure_until = np.zeros(count, dtype=np.int32)  # tokens; it is not preempted before it has confirmed them
        self.last_token_at = np.full(count, np.nan)  # seconds; NaN before the first of this use of the slot
        self.page_table = np.zeros((count, limits.pages_per_slot), dtype=np.int32)
        self.num_pages = np.zeros(count, dtype=np.int32)  # granted
        self.requests: list[Request | None] = [None] * count
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
        self.target[slot] = self.confirmed[slot] = len(ids)
        self.planned[slot] = 0
        self.max_length[slot] = request.max_length
        self.arrived_at[slot] = request.arrived_at
        self.last_token_at[slot] = np.nan
        self.requests[slot] = request
        self.ids[slot] = ids
        return slot

    def free(self, slot: int) -> None:
        """The way back of a slot whose pages are gone."""
        self.state[slot] = SlotState.FREE
        self.num_pages[slot] = 0
        self.ids[slot] = None
        self._free.append(slot)

    def pages(self, slot: int) -> Int32s:
        """A copy of the slot's page table, as far as it is granted."""
        return self.page_table[slot, : self.num_pages[slot]].copy()

    def may_decode(self) -> Int32s:
        """The slots that may have a decode row: none that could grow past its greatest length."""
        return np.flatnonzero((self.state == SlotState.DECODE) & (self.planned < self.max_length)).astype(np.int32)

    def missing_pages(self, slots: Int32s, written: Int32s) -> tuple[Int32s, Int32s]:
        """The page-table entries (slots `[G]`, indexes `[G]`) that `slots` lack to write `written` tokens each."""
        have = self.num_pages[slots]
        counts = np.maximum(-(-written // self._page_size) - have, 0)
        total = int(counts.sum())
        if not total:
            return _NOTHING, _NOTHING
        owners = np.repeat(slots, counts)
        first = np.cumsum(counts) - counts - have
        return owners, (np.arange(total) - np.repeat(first, counts)).astype(np.int32)

    def add_prefix(self, slot: int, pages: Int32s) -> None:
        """Enters pages that a slot admitted just now need not compute."""
        self.page_table[slot, : len(pages)] = pages
        self.num_pages[slot] = len(pages)
        self.planned[slot] = len(pages) * self._page_size

    def add_pages(self, slots: Int32s, indexes: Int32s, pages: Int32s) -> None:
        """Enters granted pages."""
        self.page_table[slots, indexes] = pages
        np.add.at(self.num_pages, slots, 1)

    def are_running(self, slots: Int32s) -> NDArray[np.bool_]:
        """Which of them may still bring tokens."""
        state = self.state[slots]
        running: NDArray[np.bool_] = (state != SlotState.FREE) & (state != SlotState.RETIRED)
        return running
