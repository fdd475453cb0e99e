"""Where each rank of a group is, in shared memory: the supervisor reads it when the group stalls, to name who is behind.

    64 bytes a rank, a cache line: moves so far, place, rows gathered, iterations replayed (int64 all)

All ranks of a group go through the same places in the same order, so whoever has moved least is who the others wait for.
"""

import mmap
import os
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

RANK_BYTES = 64


class Place(IntEnum):
    START = 0
    MEETING = 1
    AGREEING = 2
    IDLE = 3
    COMPUTING = 4
    ALL_REDUCE = 5
    ALL_GATHER = 6
    BROADCAST = 7

    def __str__(self) -> str:
        return _SAID[self]


_SAID = {
    Place.START: "starting",
    Place.MEETING: "meeting the other ranks",
    Place.AGREEING: "in the start's agreement",
    Place.IDLE: "waiting for a plan",
    Place.COMPUTING: "computing",
    Place.ALL_REDUCE: "in all_reduce",
    Place.ALL_GATHER: "in all_gather",
    Place.BROADCAST: "in broadcast",
}


class Mark:
    """A rank's own line of the board."""

    def __init__(self, descriptor: int | None, rank: int = 0) -> None:
        """descriptor: of the board; None: nobody looks."""
        start = rank * RANK_BYTES
        memory: mmap.mmap | bytearray = bytearray(start + RANK_BYTES) if descriptor is None else mmap.mmap(descriptor, 0)
        self._line = memoryview(memory)[start : start + RANK_BYTES].cast("q")

    def move(self, place: Place) -> None:
        self._line[1] = place
        self._line[0] += 1

    def count_gathered(self, rows: int) -> None:
        """Rows whose logits were gathered whole, though candidates were asked for."""
        self._line[2] += rows

    def count_replayed(self) -> None:
        """An iteration that ran as a CUDA graph."""
        self._line[3] += 1


class Board:
    """All lines, for the supervisor, who makes it."""

    def __init__(self, ranks: int) -> None:
        self.descriptor = os.memfd_create("lockstep-board", 0)
        os.ftruncate(self.descriptor, ranks * RANK_BYTES)
        self._lines = memoryview(mmap.mmap(self.descriptor, 0)).cast("q")
        self._ranks = range(ranks)

    @property
    def gathered_rows(self) -> int:
        """As rank 0 has counted them, which all count alike."""
        return self._lines[2]

    @property
    def replayed_iterations(self) -> int:
        """Of rank 0."""
        return self._lines[3]

    def stalled(self, pids: Sequence[int]) -> str:
        """Which ranks the others wait for, and where all of them are; pids by rank."""
        stride = RANK_BYTES // 8
        moves = [self._lines[rank * stride] for rank in self._ranks]
        places = [Place(self._lines[rank * stride + 1]) for rank in self._ranks]
        stopped = [rank for rank in self._ranks if _is_stopped(pids[rank])]
        # One that is stopped in the middle of a collective has come as far as those that wait for it there.
        behind = stopped or [rank for rank in self._ranks if moves[rank] == min(moves)]
        others = [rank for rank in self._ranks if rank not in behind]
        told = f"{_named(behind, places)}{' (stopped by a signal)' if stopped else ''}"
        return f"{told}; {_named(others, places)}" if others else told


def _named(ranks: list[int], places: list[Place]) -> str:
    """Ranks by place: "rank 2 computing, ranks 0, 1 and 3 in all_reduce"."""
    told = []
    for place in sorted({places[rank] for rank in ranks}):
        *names, last = [str(rank) for rank in ranks if places[rank] == place]
        told.append(f"ranks {', '.join(names)} and {last} {place}" if names else f"rank {last} {place}")
    return ", ".join(told)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # it is gone; how it ended is told elsewhere
        return False
