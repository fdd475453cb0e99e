"""Where each rank of a group is, in shared memory: the supervisor reads it when the group stalls, to name who is behind.

    64 bytes a rank, a cache line: moves so far, place, rows gathered, iterations replayed (int64 all)

All ranks of a group go through the same places in the same order, so whoever has moved least is who the others wait for. A board has
lines for all ranks of the group; on each of several nodes only those of its own ranks are written.
"""

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Standing:
    """Where a rank is."""

    rank: int
    moves: int
    place: Place
    stopped: bool  # by a signal


class Board:
    """All lines, for the supervisor, who makes it."""

    def __init__(self, ranks: int) -> None:
        self.descriptor = os.memfd_create("lockstep-board", 0)
        os.ftruncate(self.descriptor, ranks * RANK_BYTES)
        self._lines = memoryview(mmap.mmap(self.descriptor, 0)).cast("q")

    @property
    def gathered_rows(self) -> int:
        """As rank 0 has counted them, which all count alike."""
        return self._lines[2]

    @property
    def replayed_iterations(self) -> int:
        """Of rank 0."""
        return self._lines[3]

    def standings(self, pids: Mapping[int, int]) -> list[Standing]:
        """Of those ranks whose pids are given, by rank."""
        stride = RANK_BYTES // 8
        return [
            Standing(rank, self._lines[rank * stride], Place(self._lines[rank * stride + 1]), _is_stopped(pid))
            for rank, pid in pids.items()
        ]


def not_begun(ranks: range) -> list[Standing]:
    """Of ranks whose processes are not there yet."""
    return [Standing(rank, 0, Place.START, stopped=False) for rank in ranks]


def stalled(standings: Sequence[Standing], name: Callable[[int], str] = str) -> str:
    """Which ranks the others wait for, and where all of them are; `name` is what a rank is called."""
    least = min(each.moves for each in standings)
    stopped = [each for each in standings if each.stopped]
    # One that is stopped in the middle of a collective has come as far as those that wait for it there.
    behind = stopped or [each for each in standings if each.moves == least]
    others = [each for each in standings if each not in behind]
    told = f"{_named(behind, name)}{' (stopped by a signal)' if stopped else ''}"
    return f"{told}; {_named(others, name)}" if others else told


def _named(standings: list[Standing], name: Callable[[int], str]) -> str:
    """Ranks by place: "rank 2 computing, ranks 0, 1 and 3 in all_reduce"."""
    told = []
    for place in sorted({each.place for each in standings}):
        *names, last = [name(each.rank) for each in standings if each.place == place]
        told.append(f"ranks {', '.join(names)} and {last} {place}" if names else f"rank {last} {place}")
    return ", ".join(told)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # it is gone; how it ended is told elsewhere
        return False
