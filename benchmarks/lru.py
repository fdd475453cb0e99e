"""What a prefix cache with least-recently-used eviction finds, replayed by itself: the yardstick of the scheduler's hit rate."""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np

from shared.protocol.plan import Int32s


class LruReplay:
    """Pages of prefixes, each known by the hash of all tokens up to its end. `capacity` may be changed at any time."""

    def __init__(self, capacity: int, page_size: int) -> None:
        self.capacity = capacity
        self._page_size = page_size
        self._known: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._users: Counter[bytes] = Counter()

    def open(self, ids: Int32s | Sequence[int]) -> int:
        """A request with this prompt starts: its pages are used from now on. Returns how many of its tokens were known."""
        ends = self._ends(ids)
        known = next((number for number, end in enumerate(ends[: (len(ids) - 1) // self._page_size]) if end not in self._known), None)
        self._users.update(ends)
        self._touch(ends)
        return (known if known is not None else (len(ids) - 1) // self._page_size) * self._page_size

    def close(self, prompt: Int32s | Sequence[int], ids: Int32s | Sequence[int]) -> None:
        """It ends: nobody uses the pages of its prompt on its behalf any more, and those of `ids`, prompt included, stay."""
        self._users.subtract(self._ends(prompt))
        self._touch(self._ends(ids))

    def _touch(self, ends: list[bytes]) -> None:
        for end in reversed(ends):  # the end of a path is older than its beginning
            self._known[end] = None
            self._known.move_to_end(end)
        surplus = len(self._known) - self.capacity
        if surplus > 0:
            unused = (end for end in self._known if self._users[end] <= 0)
            for end in [each for each, _ in zip(unused, range(surplus), strict=False)]:
                del self._known[end]

    def _ends(self, ids: Int32s | Sequence[int]) -> list[bytes]:
        """A name for the prefix that ends with each whole page."""
        data, size = np.asarray(ids, dtype="<i4").tobytes(), 4 * self._page_size
        ends, end = [], b""
        for at in range(0, len(data) - size + 1, size):
            end = hashlib.blake2b(end + data[at : at + size], digest_size=16).digest()
            ends.append(end)
        return ends
