"""A node of a group beside the leader's: its ranks get the leader's entries in the leader's order, and the leader hears what they say."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from services.worker.distributed.board import not_begun
from services.worker.distributed.rendezvous import rank_name, ranks_of
from services.worker.messages import Ended, Failed, Loading, Message, Ready, encode
from services.worker.metrics import WorkerMetrics
from services.worker.nodes import agreed, silence_s
from services.worker.ranks import LocalRanks, fault
from services.worker.ring import Kind, RingFull
from services.worker.settings import WorkerSettings
from services.worker.startup import FIRST, READY, Startup
from services.worker.weights.folder import ModelFolder
from shared.addresses import host_port
from shared.admin import admin
from shared.errors import ConfigError, LockstepError, PeerLost
from shared.metrics import new_registry
from shared.process import write_ports
from shared.protocol import nodes_pb2 as pb
from shared.protocol.nodes_pb2_grpc import NodesStub
from shared.rpc import PROTOCOL_VERSION, Outbox, StreamEnded, channel, check_version, in_words, received

logger = logging.getLogger(__name__)

ROOM_EVERY_S = 0.001  # how soon a full ring is tried again: a rank here is far behind those that set the pace
VERDICT_S = 5.0  # for the leader to end the group after a rank has failed here, or after a drain


async def follow(settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Returns once `stop` is set and the leader has ended the group. Raises LockstepError, saying why, when it ends otherwise."""
    folder = ModelFolder(settings.model, settings.load_format)
    registry = new_registry("worker")
    follower = Follower(settings, WorkerMetrics(registry))
    try:
        async with admin(settings, registry, lambda: "stopping" if stop.is_set() else follower.unready()) as admin_port:
            if settings.ports_file is not None:
                write_ports(settings.ports_file, {"admin": admin_port})
            await follower.follow(await asyncio.to_thread(lambda: folder.fingerprint), stop)
    finally:
        follower.stop()


class Follower:
    """Starts its ranks once the leader has taken this node in: before, they could meet those of the group in the place of its own."""

    def __init__(self, settings: WorkerSettings, metrics: WorkerMetrics) -> None:
        self.settings = settings
        self._numbers = ranks_of(settings.node_index, settings.nodes, settings.tensor_parallel_size)
        self._ranks: LocalRanks | None = None
        self._startup = Startup()
        self._ready: set[int] = set()
        self._lost_a_peer: set[int] = set()  # ranks that end since another one has, perhaps on another node: the leader knows
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outbox: Outbox[pb.NodesJoinRequest] = Outbox(lambda: self._request(heartbeat=pb.NodeHeartbeat()))
        self._tell_phase = metrics.node(settings.group, lambda: self._ranks.pids if self._ranks else {})
        for rank in self._numbers:
            self._startup.expect(rank, "waiting for the leader")
        self._tell_phase(*self._startup.slowest)

    def unready(self) -> str | None:
        """What this node still waits for, or what has happened to it; callable from any thread."""
        if len(self._ready) < len(self._numbers):
            return "{}: {:.0%}".format(*self._startup.slowest)
        return "a rank has failed" if self._failed.done() else None

    async def follow(self, fingerprint: str, stop: asyncio.Event) -> None:
        """As the function `follow`; fingerprint: of the model."""
        settings = self.settings
        assert settings.leader_address is not None, "settings demand it"
        target = host_port(settings.leader_address, settings.port)
        hello = pb.NodeHello(protocol_version=PROTOCOL_VERSION, node=settings.node_index, agreed=agreed(settings, fingerprint))
        self._outbox.put(pb.NodesJoinRequest(hello=hello))
        logger.info("node %d asks its leader at %s to take it in", settings.node_index, target)
        async with channel(target, settings.tls_folder) as opened:
            responses = NodesStub(opened).Join(aiter(self._outbox), wait_for_ready=True)
            following = asyncio.create_task(self._follow(aiter(responses)))
            stopping = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait((following, stopping, self._failed), return_when=asyncio.FIRST_COMPLETED)
                if stop.is_set():
                    if self._ranks is not None:
                        self._outbox.put(self._request(leaving=pb.NodeLeaving()))
                        await asyncio.wait((following,), timeout=settings.drain_s + VERDICT_S)
                    return
                if self._failed.done():
                    await asyncio.wait((following,), timeout=VERDICT_S)
                    self._failed.result()
                following.result()
            finally:
                following.cancel()
                stopping.cancel()
                await asyncio.gather(following, stopping, return_exceptions=True)

    def stop(self) -> None:
        if self._ranks is not None:
            self._ranks.stop()

    def _request(self, **message: Any) -> pb.NodesJoinRequest:
        standings = self._ranks.standings() if self._ranks else not_begun(self._numbers)
        where = [pb.NodeStanding(moves=each.moves, place=each.place, stopped=each.stopped) for each in standings]
        return pb.NodesJoinRequest(standings=where, **message)

    async def _follow(self, responses: AsyncIterator[pb.NodesJoinResponse]) -> None:
        """Until the leader ends the stream. Raises ConfigError when it refuses this node, else StreamEnded, with the leader's words."""
        wait_s = self.settings.start_deadline_s
        try:
            async with asyncio.timeout(wait_s):
                welcome = (await anext(responses, pb.NodesJoinResponse())).welcome
        except TimeoutError as error:
            raise PeerLost(f"no leader at {self.settings.leader_address} within start_deadline_s={wait_s:g}") from error
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                raise ConfigError(f"the leader refuses this node: {error.details()}") from error
            raise StreamEnded(f"the leader: {in_words(error)}") from error
        check_version(welcome.protocol_version, "the leader")
        logger.info("the leader has taken node %d in", self.settings.node_index)
        self._ranks = ranks = LocalRanks(self.settings, self._on_message)
        for rank in self._numbers:
            self._advance(rank, FIRST, 0.0)
        async for response in received(responses, "the leader", silence_s(self.settings)):
            for entry in response.entries.entries:
                await written(ranks.write, Kind(entry.kind), entry.plan, entry.payload)
            if response.HasField("stacks"):
                ranks.print_stacks()
        raise StreamEnded("the leader has ended the group")

    def _on_message(self, rank: int, message: Message) -> None:
        self._outbox.put(self._request(told=pb.NodeTold(rank=rank, message=encode(message))))
        name = rank_name(rank, self.settings.nodes, self.settings.tensor_parallel_size)
        match message:
            case Loading(phase, progress):
                self._advance(rank, phase, progress)
            case Ready():
                self._ready.add(rank)
                if len(self._ready) == len(self._numbers):
                    self._tell_phase(READY, 1.0)
            case Failed(peer=True):
                self._lost_a_peer.add(rank)
            case Failed():
                self._fail(fault(name, message))
            case Ended() if rank not in self._lost_a_peer:
                self._fail(fault(name, message))

    def _advance(self, rank: int, phase: str, progress: float) -> None:
        self._startup.advance(rank, phase, progress)
        self._tell_phase(*self._startup.slowest)

    def _fail(self, error: LockstepError) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)


async def written(write: Callable[[Kind, int, bytes], None], kind: Kind, plan: int, payload: bytes) -> None:
    """Waits for room in the ring: meanwhile nothing more is read of the stream, which the leader bounds."""
    while True:
        try:
            write(kind, plan, payload)
        except RingFull:
            await asyncio.sleep(ROOM_EVERY_S)
        else:
            return
