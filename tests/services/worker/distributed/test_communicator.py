"""Two ranks over TCP, as on two nodes, and what is told when one is missing or dies."""

import multiprocessing
import os
import pickle
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from services.worker.distributed.board import Board, Mark, stalled
from services.worker.distributed.communicator import CollectiveFailed, SingleCommunicator, communicator
from services.worker.distributed.preflight import CPU_SIZES
from services.worker.distributed.rendezvous import Rendezvous
from shared.errors import PeerLost
from shared.ports import port_of, reserve

RANKS = 2
DEADLINE_S = 60.0
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64]


def serve(rank: int, url: str, link: Connection) -> None:
    """One rank: sends a result of each collective; then the last one dies, and the others notice."""
    torch.set_num_threads(1)
    group = communicator(rank, RANKS, url, CPU, "torch", 30.0, 30.0, Mark(None))
    results = {
        "sum": [group.all_reduce(torch.full((3, 5), rank + 1).to(dtype)) for dtype in DTYPES],
        "gather": [group.all_gather((torch.arange(6).view(2, 3) + 10 * rank).to(dtype)) for dtype in DTYPES],
        "strided": group.all_gather((torch.arange(6).view(3, 2) + 10 * rank).T),
        "broadcast": [group.broadcast(torch.tensor([rank, 7]), source) for source in range(RANKS)],
        "minimum": group.minimum(100 - rank),
        "empty": group.all_gather(torch.empty(0, 3)),
        "sums": group.sums,
    }
    link.send_bytes(pickle.dumps(results))  # by value: `send` would share memory with a rank that dies
    if rank == RANKS - 1:
        os._exit(1)
    try:
        while True:  # until the connection breaks
            group.all_reduce(torch.ones(1000))
    except CollectiveFailed as error:
        link.send(str(error))
    os._exit(0)


@pytest.fixture(scope="module")
def links() -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    processes, links = [], []
    with reserve("127.0.0.1") as reservation:
        for node in range(2):
            place = Rendezvous.over_nodes(RANKS, 2, node, "127.0.0.1", port_of(reservation))
            for rank in place.ranks:
                ours, theirs = context.Pipe()
                processes.append(context.Process(target=serve, args=(rank, place.url, theirs), daemon=True))
                processes[-1].start()
                theirs.close()
                links.append(ours)
        yield links
    for process in processes:
        process.kill()
        process.join()


def test_collectives_over_tcp_and_the_end_of_a_rank(links: list[Connection]) -> None:
    for rank, link in enumerate(links):
        assert link.poll(DEADLINE_S)
        results = pickle.loads(link.recv_bytes())
        for dtype, total, gathered in zip(DTYPES, results["sum"], results["gather"], strict=True):
            assert torch.equal(total, torch.full((3, 5), sum(range(1, RANKS + 1))).to(dtype))
            expected = torch.cat([torch.arange(6).view(2, 3) + 10 * source for source in range(RANKS)], dim=1)
            assert torch.equal(gathered, expected.to(dtype))
        assert results["strided"].tolist() == [[10 * s + c for s in range(RANKS) for c in (r, r + 2, r + 4)] for r in range(2)]
        assert [each.tolist() for each in results["broadcast"]] == [[source, 7] for source in range(RANKS)]
        assert [(each.transport, each.ranks, each.size) for each in results["sums"].times] == [("gloo", RANKS, size) for size in CPU_SIZES]
        assert all(0 < each.seconds < DEADLINE_S for each in results["sums"].times)
        assert (results["minimum"], results["empty"].shape) == (100 - (RANKS - 1), (0, 3 * RANKS)), rank
    for link in links[:-1]:
        assert link.poll(DEADLINE_S)
        assert link.recv().startswith("all_reduce failed: ")


def test_ranks_that_do_not_come_are_waited_for_no_longer_than_told(tmp_path: Path) -> None:
    board = Board(2)
    url = Rendezvous.on_one_node(2, tmp_path).url
    with pytest.raises(PeerLost, match=r"the 2 ranks did not meet at file://.*/rendezvous within 0\.3 s"):
        communicator(0, 2, url, CPU, "auto", 0.3, 1.0, Mark(board.descriptor, 0))
    assert stalled(board.standings(dict.fromkeys(range(2), os.getpid()))) == "rank 1 starting; rank 0 meeting the other ranks"


def test_a_group_of_one_needs_nothing() -> None:
    group = communicator(0, 1, "")
    assert isinstance(group, SingleCommunicator)
    x = torch.arange(6.0).view(2, 3)
    assert all(torch.equal(each, x) for each in (group.all_reduce(x), group.all_gather(x), group.broadcast(x)))
    assert group.minimum(4) == 4
