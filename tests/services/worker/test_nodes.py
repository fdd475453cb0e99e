"""A group over two nodes, here two workers on the loopback whose engines play a script: who may join, and how both end when one does."""

import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from prometheus_client import CollectorRegistry

from services.worker.messages import Ended, encode
from services.worker.metrics import WorkerMetrics
from services.worker.nodes import NodesService, agreed
from services.worker.ranks import GroupFailed
from services.worker.remote import RemoteRanks
from services.worker.settings import WorkerSettings
from services.worker.supervisor import Supervisor
from shared.protocol import nodes_pb2 as pb
from shared.protocol.nodes_pb2_grpc import NodesStub, add_NodesServicer_to_server
from shared.rpc import PROTOCOL_VERSION, StreamEnded, channel, start_server
from shared.settings import load
from tests.services.worker.client import Worker, execution, over_nodes
from tests.tiny import weightless_model

Requests = asyncio.Queue[pb.NodesJoinRequest | None]  # None ends them
Responses = AsyncIterator[pb.NodesJoinResponse]

DEATHS = {
    "killed leader": (0, signal.SIGKILL, r"the leader: unavailable: "),
    "stopped leader": (0, signal.SIGSTOP, r"the leader sent nothing for 3 s"),
    "killed follower": (1, signal.SIGKILL, r"node 1 has gone"),
    "stopped follower": (1, signal.SIGSTOP, r"node 1 sent nothing for 3 s"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weightless_model(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def two_nodes(folder: Path, model: Path) -> Iterator[tuple[Worker, Worker]]:
    """Leader and follower."""
    script = ("--model", str(model), "--engine", "scripted", "--tensor-parallel-size", "2", "--page-size", "4", "--num-pages", "100")
    leader, follower = over_nodes(folder, 2, *script, "--step-deadline-s", "3")
    try:
        yield leader, follower
    finally:
        for worker in (leader, follower):
            worker.clean_up()


async def test_a_node_with_other_settings_is_refused_and_one_that_is_told_to_stop_drains_the_group(tmp_path: Path, model: Path) -> None:
    with two_nodes(tmp_path, model) as (leader, follower):
        await leader.ready()
        stranger = Worker(tmp_path, *follower.arguments, "--page-size", "8")
        assert await stranger.ended(30) == 2
        assert "the leader refuses this node: page_size: 8 at node 1, 4 at the leader" in stranger.last_line
        assert "Traceback" not in stranger.log
        async with execution(leader.port) as stream:  # which the ranks of both nodes have answered
            follower.process.terminate()
            async for message in stream.incoming:
                if message.WhichOneof("message") == "draining":
                    break
            assert follower.process.poll() is None
        assert [await worker.ended(30) for worker in (leader, follower)] == [0, 0]


@pytest.mark.parametrize("death", DEATHS)
async def test_tp_07_whoever_is_left_of_two_nodes_ends_and_says_why(tmp_path: Path, model: Path, death: str) -> None:
    number, sign, cause = DEATHS[death]
    with two_nodes(tmp_path, model) as group:
        leader, victim, survivor = group[0], group[number], group[1 - number]
        await leader.ready()
        ranks = [rank for worker in group for rank in worker.ranks()]
        async with execution(leader.port) as stream:
            victim.process.send_signal(sign)
            with pytest.raises(StreamEnded):
                await stream.result()
            assert await survivor.ended(30) == 1
        assert re.search(cause, survivor.last_line)
        assert "Traceback" not in survivor.log
        victim.process.kill()
        assert not psutil.wait_procs(ranks, timeout=30)[1]


class Joined:
    """A leader's service with the group that it is for, which has no ranks of its own, and a way to it."""

    def __init__(self, supervisor: Supervisor, ours: dict[str, str], stub: NodesStub, stop: asyncio.Event) -> None:
        self.supervisor, self.ours, self.stub, self.stop = supervisor, ours, stub, stop

    def join(self, node: int = 1, protocol: str = PROTOCOL_VERSION, **changes: str) -> tuple[Requests, Responses]:
        """Says hello."""
        requests: Requests = asyncio.Queue()
        requests.put_nowait(pb.NodesJoinRequest(hello=pb.NodeHello(protocol_version=protocol, node=node, agreed={**self.ours, **changes})))

        async def said() -> AsyncIterator[pb.NodesJoinRequest]:
            while (request := await requests.get()) is not None:
                yield request

        return requests, aiter(self.stub.Join(said()))


@pytest.fixture
async def joined(model: Path) -> AsyncIterator[Joined]:
    place = ("--tensor-parallel-size", "3", "--nodes", "3", "--leader-address", "here")
    settings = load(WorkerSettings, "worker", ["--model", str(model), *place])
    supervisor, stop = Supervisor(settings, WorkerMetrics(CollectorRegistry()).group("group-0", 3)), asyncio.Event()
    supervisor.remote = [RemoteRanks(node, range(node, node + 1), lambda rank, message: None, supervisor.fail) for node in (1, 2)]
    ours = agreed(settings, "0123")
    server = grpc.aio.server()
    add_NodesServicer_to_server(NodesService(supervisor, ours, stop), server)
    port = await start_server(server, "127.0.0.1", 0)
    async with channel(f"127.0.0.1:{port}") as opened:
        yield Joined(supervisor, ours, NodesStub(opened), stop)
    await server.stop(0)
    supervisor.stop()


@pytest.mark.parametrize(
    "node, protocol, changes, refusal",
    [
        (1, "2.0", {}, "node 1 speaks protocol 2.0, we speak"),
        (1, PROTOCOL_VERSION, {"model": "4567"}, "model: 4567 at node 1, 0123 at the leader: all nodes of a group have the same"),
        (2, PROTOCOL_VERSION, {"release": "0.0.1", "dtype": "float16"}, "release: 0.0.1 at node 2, "),
        (3, PROTOCOL_VERSION, {}, "node_index: 3 is none of the nodes from 1 to 2 beside the leader's"),
        (0, PROTOCOL_VERSION, {}, "node_index: 0 is none"),
    ],
)
async def test_who_may_not_join_learns_why(joined: Joined, node: int, protocol: str, changes: dict[str, str], refusal: str) -> None:
    _, responses = joined.join(node, protocol, **changes)
    with pytest.raises(grpc.aio.AioRpcError, match=refusal) as refused:
        await anext(responses)
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert not joined.supervisor.failed.done()


async def test_a_node_joins_once_and_its_nonsense_ends_the_group(joined: Joined) -> None:
    requests, responses = joined.join()
    assert (await anext(responses)).HasField("welcome")
    _, again = joined.join()
    with pytest.raises(grpc.aio.AioRpcError, match="node 1 has been here before"):
        await anext(again)
    assert not joined.supervisor.failed.done()
    told = pb.NodeTold(rank=2, message=encode(Ended("by SIGKILL")))  # that of node 2
    requests.put_nowait(pb.NodesJoinRequest(told=told, standings=[pb.NodeStanding()]))
    with pytest.raises(grpc.aio.AioRpcError, match="node 1 speaks for rank 2"):
        await anext(responses)
    with pytest.raises(GroupFailed, match="node 1 speaks for rank 2"):
        await joined.supervisor.failed


async def test_a_node_that_hangs_up_ends_the_group(joined: Joined) -> None:
    requests, responses = joined.join(2)
    await anext(responses)
    requests.put_nowait(None)
    with pytest.raises(GroupFailed, match="node 2 has gone"):
        await joined.supervisor.failed
