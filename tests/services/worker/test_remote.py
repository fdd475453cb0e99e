"""What goes to another node, and what is taken from it, without the node."""

import numpy as np
import pytest

from services.worker.distributed.board import Place, Standing
from services.worker.messages import Done, Ended, Loading, Message, encode
from services.worker.remote import MERGED_BYTES, UNREAD_BYTES, RemoteRanks
from services.worker.ring import Kind
from shared.errors import LockstepError, ProtocolError
from shared.protocol import nodes_pb2 as pb

STANDINGS = [pb.NodeStanding(moves=7, place=Place.COMPUTING), pb.NodeStanding(moves=8, place=Place.ALL_REDUCE, stopped=True)]


class Heard:
    """Ranks 2 and 3, on node 1, and what their supervisor hears of them."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Message]] = []
        self.failures: list[LockstepError] = []
        self.remote = RemoteRanks(1, range(2, 4), lambda rank, message: self.told.append((rank, message)), self.failures.append)


async def sent(remote: RemoteRanks) -> list[pb.NodesJoinResponse]:
    """All that waits."""
    remote.stop()
    return [message async for message in remote.outbox]


async def test_entries_that_wait_travel_together_and_nothing_overtakes() -> None:
    remote = Heard().remote
    remote.write(Kind.PLAN, 1, b"plan")
    remote.write(Kind.RUN, 1)
    remote.print_stacks()
    remote.write(Kind.RUN, 1)
    remote.write(Kind.RESET, 3)
    together, stacks, later = await sent(remote)
    assert [(entry.kind, entry.plan, entry.payload) for entry in together.entries.entries] == [(1, 1, b"plan"), (2, 1, b"")]
    assert stacks.HasField("stacks")
    assert [(entry.kind, entry.plan) for entry in later.entries.entries] == [(2, 1), (3, 3)]


async def test_a_message_stays_within_its_bound() -> None:
    remote = Heard().remote
    for plan in range(3):
        remote.write(Kind.PLAN, plan, bytes(MERGED_BYTES // 2))
    assert [len(message.entries.entries) for message in await sent(remote)] == [2, 1]


async def test_a_node_that_leaves_too_much_unread_is_lost() -> None:
    heard = Heard()
    for plan in range(UNREAD_BYTES // MERGED_BYTES):
        heard.remote.write(Kind.PLAN, plan, bytes(MERGED_BYTES))
    assert not heard.failures
    heard.remote.write(Kind.PLAN, 9, b"more")
    assert str(heard.failures[0]) == f"node 1 has left {UNREAD_BYTES + 4} bytes of plans unread"


async def test_what_ranks_say_and_where_they_are_is_passed_on() -> None:
    heard = Heard()
    assert heard.remote.standings() == [Standing(rank, 0, Place.START, False) for rank in (2, 3)]
    told = pb.NodeTold(rank=3, message=encode(Ended("by SIGKILL")))
    heard.remote.hear(pb.NodesJoinRequest(told=told, standings=STANDINGS))
    heard.remote.hear(pb.NodesJoinRequest(heartbeat=pb.NodeHeartbeat(), standings=STANDINGS))
    assert heard.told == [(3, Ended("by SIGKILL"))]
    assert heard.remote.standings() == [Standing(2, 7, Place.COMPUTING, False), Standing(3, 8, Place.ALL_REDUCE, True)]


@pytest.mark.parametrize(
    "rank, message, standings",
    [
        (1, encode(Loading("loading weights", 0.5)), STANDINGS),
        (2, encode(Done(1, 0, 0, 0, 0, np.empty(0, dtype=np.int32))), STANDINGS),
        (2, b"", STANDINGS),
        (2, b"L{}", STANDINGS),
        (2, encode(Loading("loading weights", 0.5)), STANDINGS[:1]),
        (2, encode(Loading("loading weights", 0.5)), [pb.NodeStanding(place=100)] * 2),
    ],
)
async def test_what_no_node_may_say_is_refused(rank: int, message: bytes, standings: list[pb.NodeStanding]) -> None:
    heard = Heard()
    with pytest.raises(ProtocolError):
        heard.remote.hear(pb.NodesJoinRequest(told=pb.NodeTold(rank=rank, message=message), standings=standings))
    assert not heard.told
