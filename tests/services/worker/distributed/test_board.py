"""Who is named when a group stalls."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from services.worker.distributed.board import Board, Mark, Place, stalled
from services.worker.distributed.rendezvous import rank_name

ME = os.getpid()


@pytest.fixture
def stopped() -> Iterator[int]:
    """The pid of a process that a signal has stopped."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    yield process.pid
    process.kill()
    process.communicate()


def board(*paths: list[Place]) -> Board:
    made = Board(len(paths))
    for rank, places in enumerate(paths):
        mark = Mark(made.descriptor, rank)
        for place in places:
            mark.move(place)
    return made


IN_STEP = [Place.IDLE, Place.COMPUTING]
WAITING = [*IN_STEP, Place.ALL_REDUCE]


@pytest.mark.parametrize(
    "paths, told",
    [
        ([WAITING, WAITING, IN_STEP, WAITING], "rank 2 computing; ranks 0, 1 and 3 in all_reduce"),
        ([WAITING, [Place.IDLE]], "rank 1 waiting for a plan; rank 0 in all_reduce"),
        ([WAITING, WAITING], "ranks 0 and 1 in all_reduce"),
        ([[*WAITING, Place.COMPUTING, Place.ALL_GATHER], WAITING], "rank 1 in all_reduce; rank 0 in all_gather"),
        ([[*WAITING, Place.COMPUTING], WAITING, IN_STEP], "rank 2 computing; rank 0 computing, rank 1 in all_reduce"),
        ([[Place.MEETING], [], []], "ranks 1 and 2 starting; rank 0 meeting the other ranks"),
        ([IN_STEP], "rank 0 computing"),
    ],
)
def test_whoever_is_behind_is_named(paths: list[list[Place]], told: str) -> None:
    assert stalled(board(*paths).standings(dict.fromkeys(range(len(paths)), ME))) == told


def test_a_stopped_rank_is_named_though_it_has_come_as_far_as_those_who_wait(stopped: int) -> None:
    standings = board(WAITING, WAITING, WAITING).standings({0: ME, 1: stopped, 2: ME})
    assert stalled(standings) == "rank 1 in all_reduce (stopped by a signal); ranks 0 and 2 in all_reduce"


def test_a_rank_that_is_gone_is_not_called_stopped() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert stalled(board(WAITING).standings({0: process.pid})) == "rank 0 in all_reduce"


def test_ranks_of_several_nodes_are_named_with_their_node() -> None:
    here, there = board(WAITING, WAITING, [], []), board([], [], IN_STEP, WAITING)  # a board a node, with lines for all
    standings = here.standings({0: ME, 1: ME}) + there.standings({2: ME, 3: ME})
    told = stalled(standings, lambda rank: rank_name(rank, nodes=2, ranks=4))
    assert told == "rank 2 (node 1) computing; ranks 0 (node 0), 1 (node 0) and 3 (node 1) in all_reduce"


def test_a_mark_that_nobody_looks_at_moves_too() -> None:
    Mark(None, 3).move(Place.BROADCAST)
