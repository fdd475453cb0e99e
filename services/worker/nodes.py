"""The leader's gRPC side of a group that spans nodes: which nodes may join it, and what they are told when it ends."""

import asyncio
import logging
from collections.abc import AsyncIterator
from importlib.metadata import version

import grpc

from services.worker.remote import RemoteRanks
from services.worker.settings import WorkerSettings
from services.worker.supervisor import Supervisor
from shared.errors import LockstepError, ProtocolError
from shared.protocol import nodes_pb2 as pb
from shared.protocol.nodes_pb2_grpc import NodesServicer
from shared.rpc import CONNECT_S, Context, check_version, received

logger = logging.getLogger(__name__)

Requests = AsyncIterator[pb.NodesJoinRequest]

# What nodes of a group may have each for itself; all else they must have alike, and the model by its fingerprint.
OF_A_NODE = frozenset(
    {
        "admin_port",
        "drain_s",
        "group",
        "host",
        "kv_cache_memory_bytes",
        "leader_address",
        "log_format",
        "log_level",
        "memory_fraction",
        "model",
        "node_index",
        "parent_pid",
        "port",
        "ports_file",
        "profile_folder",
        "script",
        "start_deadline_s",
        "step_deadline_s",
        "threads",
        "tls_folder",
    }
)
# Of a dead stream: more than elsewhere, since a group takes minutes to start anew, and a busy node is not a dead one.
SILENCE_S = 5.0


def silence_s(settings: WorkerSettings) -> float:
    """How long a node may be silent: no longer than a step may take."""
    return min(SILENCE_S, settings.step_deadline_s)


def agreed(settings: WorkerSettings, fingerprint: str) -> dict[str, str]:
    """What all nodes of a group must have alike, by name."""
    own = {name: str(value) for name, value in settings.model_dump(mode="json", exclude=set(OF_A_NODE)).items()}
    return {"release": version("lockstep"), "model": fingerprint, **own}


class NodesService(NodesServicer):
    def __init__(self, supervisor: Supervisor, agreed: dict[str, str], stop: asyncio.Event) -> None:
        """stop: set when a node is told to stop: the group ends as a whole."""
        self._remote = {remote.node: remote for remote in supervisor.remote}
        self._failed, self._agreed, self._stop = supervisor.failed, agreed, stop
        self._silence_s = silence_s(supervisor.settings)
        self._failed.add_done_callback(self._on_failure)

    async def Join(self, requests: Requests, context: Context) -> AsyncIterator[pb.NodesJoinResponse]:
        remote = await self._hello(requests, context)
        remote.join()
        reader = asyncio.create_task(self._read(requests, remote))
        try:
            async for message in remote.outbox:
                yield message
        except LockstepError as error:
            reader.cancel()  # first: it may not read from what is aborted
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        finally:  # also when grpc cancels this, since the connection has broken
            reader.cancel()
            remote.lost(f"node {remote.node} has gone")

    def close(self) -> None:
        """The other nodes end in good order."""
        for remote in self._remote.values():
            remote.stop()

    def _on_failure(self, failed: asyncio.Future[None]) -> None:
        """Lets the nodes know the cause."""
        error = failed.exception()
        if isinstance(error, LockstepError):
            for remote in self._remote.values():
                remote.outbox.close(error)

    async def _hello(self, requests: Requests, context: Context) -> RemoteRanks:
        try:
            async with asyncio.timeout(CONNECT_S):
                hello = (await anext(requests, pb.NodesJoinRequest())).hello
        except TimeoutError:
            hello = pb.NodeHello()
        refusal = self._refusal(hello)
        if refusal is not None:
            logger.warning("node %d is refused: %s", hello.node, refusal)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        remote = self._remote[hello.node]
        if remote.joined or self._failed.done():
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"node {hello.node} has been here before: this group is ending, come again")
        return remote

    def _refusal(self, hello: pb.NodeHello) -> str | None:
        try:
            check_version(hello.protocol_version, f"node {hello.node}")
        except ProtocolError as error:
            return str(error)
        theirs = dict(hello.agreed)
        for name, ours in self._agreed.items():
            if theirs.get(name) != ours:
                return f"{name}: {theirs.get(name)} at node {hello.node}, {ours} at the leader: all nodes of a group have the same"[:1000]
        if hello.node not in self._remote:
            return f"node_index: {hello.node} is none of the nodes from 1 to {len(self._remote)} beside the leader's"
        return None

    async def _read(self, requests: Requests, remote: RemoteRanks) -> None:
        """Until the stream ends, one way or the other."""
        try:
            async for request in received(requests, f"node {remote.node}", self._silence_s):
                if request.HasField("leaving"):
                    logger.info("node %d is told to stop, and so the group", remote.node)
                    self._stop.set()
                remote.hear(request)
            remote.lost(f"node {remote.node} has gone")
        except LockstepError as error:
            remote.lost(str(error))
        except Exception as error:  # the edge: what a node sends ends the group, never this task alone
            logger.exception("node %d: a message failed", remote.node)
            remote.lost(f"node {remote.node}: {type(error).__name__}: {error}")
