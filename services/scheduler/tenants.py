"""Fairness between the tenants of a group: who has had the least goes first, who has had the most gives way first."""

import numpy as np
from numpy.typing import NDArray

from shared.protocol.plan import Int32s

MAX_IDLE = 10_000  # tenants without requests that are remembered
FIRST_SIZE = 16


class Tenants:
    """Counts computed tokens by tenant. What came from the prefix cache costs nothing.

    A tenant that had no requests is lifted to the least of those that have some: time away earns no credit, and a debt stays.
    """

    def __init__(self) -> None:
        self._index: dict[str, int] = {}  # those without requests in the order in which they became so
        self._free: list[int] = []
        self._computed = np.zeros(FIRST_SIZE, dtype=np.int64)
        self._requests = np.zeros(FIRST_SIZE, dtype=np.int64)
        self._idle: dict[str, None] = {}

    def join(self, tenant: str) -> int:
        """A request of the tenant is here. Returns the tenant's index, valid until as many have left."""
        index = self._index.get(tenant)
        if index is None:
            index = self._index[tenant] = self._new_index()
        self._idle.pop(tenant, None)
        if not self._requests[index]:
            active = self._computed[self._requests > 0]
            if len(active):
                self._computed[index] = max(self._computed[index], active.min())
        self._requests[index] += 1
        return index

    def leave(self, tenant: str) -> None:
        """The reverse of `join`."""
        index = self._index[tenant]
        self._requests[index] -= 1
        if not self._requests[index]:
            self._idle[tenant] = None
            if len(self._idle) > MAX_IDLE:
                forgotten = next(iter(self._idle))
                del self._idle[forgotten]
                self._free.append(self._index.pop(forgotten))

    def computed(self, tenant: str) -> int:
        """The tenant's counter, in tokens; 0 when it is not known. It never falls while the tenant has requests."""
        index = self._index.get(tenant)
        return int(self._computed[index]) if index is not None else 0

    def computed_at(self, indexes: NDArray[np.intp]) -> NDArray[np.int64]:
        """The counters of tenants that have requests, by their indexes."""
        return self._computed[indexes]

    def charge(self, indexes: NDArray[np.intp], tokens: int | Int32s) -> None:
        """So many tokens are computed for each of these: the same number, or one for each."""
        if isinstance(tokens, int):
            self._computed += np.bincount(indexes, minlength=len(self._computed)) * tokens
        else:
            np.add.at(self._computed, indexes, tokens)

    def _new_index(self) -> int:
        if self._free:
            index = self._free.pop()
            self._computed[index] = 0
            return index
        index = len(self._index)
        if index == len(self._computed):
            self._computed = np.concatenate((self._computed, np.zeros_like(self._computed)))
            self._requests = np.concatenate((self._requests, np.zeros_like(self._requests)))
        return index
