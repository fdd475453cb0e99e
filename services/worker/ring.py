"""The ring that carries plans from the supervisor to the ranks of its host: one writer, every rank reads every entry, in order.

    byte 0        8               8 * (1 + ranks)          4096
    | written     | read by rank 0 | read by rank 1 ...     | data: entries, 16-byte aligned, never wrapping

Positions count bytes since the start and only grow. The memory is an anonymous file that children inherit by descriptor: no
name that could clash with another instance or outlive a crash. A rank sleeps on an eventfd, its bell.
"""

import mmap
import os
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from shared.errors import LockstepError
from shared.protocol.plan import MAX_PLAN_BYTES

DATA_START = 4096
CAPACITY = 8 << 20  # bytes; several plans of the largest size
ENTRY_HEADER = np.dtype([("size", "<i4"), ("kind", "<i4"), ("plan", "<i8")])  # size: of the payload in bytes


class Kind(IntEnum):
    PAD = 0  # up to the end of the data, where the next entry would not fit
    PLAN = 1  # payload: the plan as it came
    RUN = 2  # one iteration of a plan written before
    RESET = 3  # plan: the number that the answer carries
    STOP = 4


@dataclass(frozen=True)
class Entry:
    kind: Kind
    plan: int
    payload: NDArray[np.int32]  # a copy


class RingFull(LockstepError):
    """A rank has not read far enough; room comes with results."""


def create_ring() -> int:
    """The descriptor of a new ring's memory."""
    descriptor = os.memfd_create("lockstep-ring", 0)
    os.ftruncate(descriptor, DATA_START + CAPACITY)
    return descriptor


class RingWriter:
    def __init__(self, descriptor: int, bells: list[int]) -> None:
        """bells: an eventfd of each rank."""
        self._bytes = np.frombuffer(mmap.mmap(descriptor, DATA_START + CAPACITY), dtype=np.uint8)
        self._positions = self._bytes[: 8 * (1 + len(bells))].view(np.int64)
        self._bells = bells

    def write(self, kind: Kind, plan: int, payload: bytes = b"") -> None:
        """Appends an entry and wakes the ranks. Raises RingFull, having written nothing, when there is no room."""
        size = _padded(ENTRY_HEADER.itemsize + len(payload))
        start = int(self._positions[0])
        to_end = CAPACITY - start % CAPACITY
        total = size if size <= to_end else to_end + size
        if start + total - int(self._positions[1:].min()) > CAPACITY:
            raise RingFull(f"no room for {len(payload)} bytes")
        if total > size:
            self._put(start, Kind.PAD, 0, to_end - ENTRY_HEADER.itemsize)
            start += to_end
        offset = self._put(start, kind, plan, len(payload))
        self._bytes[offset : offset + len(payload)] = np.frombuffer(payload, dtype=np.uint8)
        self._positions[0] = start + size  # last: what lies below it is whole
        for bell in self._bells:
            os.eventfd_write(bell, 1)

    def _put(self, position: int, kind: Kind, plan: int, size: int) -> int:
        offset = DATA_START + position % CAPACITY
        self._bytes[offset : offset + ENTRY_HEADER.itemsize].view(ENTRY_HEADER)[0] = (size, kind, plan)
        return offset + ENTRY_HEADER.itemsize


class RingReader:
    def __init__(self, descriptor: int, bell: int, rank: int, ranks: int) -> None:
        self._bytes = np.frombuffer(mmap.mmap(descriptor, DATA_START + CAPACITY), dtype=np.uint8)
        positions = self._bytes[: 8 * (1 + ranks)].view(np.int64)
        self._written, self._read = positions[:1], positions[1 + rank : 2 + rank]
        self._bell = bell

    def empty(self) -> bool:
        return int(self._read[0]) == int(self._written[0])

    def read(self) -> Entry:
        """The next entry; sleeps until there is one."""
        while True:
            while self.empty():
                os.eventfd_read(self._bell)
            start = int(self._read[0])
            offset = DATA_START + start % CAPACITY
            size, kind, plan = self._bytes[offset : offset + ENTRY_HEADER.itemsize].view(ENTRY_HEADER)[0].tolist()
            offset += ENTRY_HEADER.itemsize
            payload = self._bytes[offset : offset + size].copy().view(np.int32) if kind == Kind.PLAN else _EMPTY
            self._read[0] = start + _padded(ENTRY_HEADER.itemsize + size)
            if kind != Kind.PAD:
                return Entry(Kind(kind), plan, payload)


_EMPTY = np.empty(0, dtype=np.int32)
assert 2 * (MAX_PLAN_BYTES + ENTRY_HEADER.itemsize) <= CAPACITY


def _padded(size: int) -> int:
    return -(-size // 16) * 16  # so that the header of a PAD always fits
