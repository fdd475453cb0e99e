"""Ranks of another node, as the leader's supervisor has them: through the stream of that node's supervisor."""

import logging
from collections import deque
from collections.abc import Callable

from services.worker.distributed.board import Place, Standing, not_begun
from services.worker.messages import Ended, Failed, Loading, Ready, ResetDone, decode
from services.worker.ranks import GroupFailed, Tell
from services.worker.ring import CAPACITY, Kind
from services.worker.startup import FIRST
from shared.errors import LockstepError, ProtocolError
from shared.protocol import nodes_pb2 as pb
from shared.protocol.plan import MAX_PLAN_BYTES
from shared.rpc import PROTOCOL_VERSION, Outbox

logger = logging.getLogger(__name__)

MERGED_BYTES = MAX_PLAN_BYTES  # of payloads in one message
UNREAD_BYTES = CAPACITY  # of payloads: as much as a ring holds


class RemoteRanks:
    """Those of one other node, through the stream of its supervisor."""

    def __init__(self, node: int, numbers: range, tell: Tell, fail: Callable[[LockstepError], None]) -> None:
        """fail: hears of what ends the group."""
        self.node, self.numbers, self.joined = node, numbers, False
        self._tell, self._fail, self._stopped = tell, fail, False
        self._standings = not_begun(numbers)
        self._unread_bytes = 0
        self.outbox: Outbox[pb.NodesJoinResponse] = Outbox(lambda: pb.NodesJoinResponse(heartbeat=pb.NodeHeartbeat()), self._next)

    def write(self, kind: Kind, plan: int, payload: bytes = b"") -> None:
        self._unread_bytes += len(payload)
        if self._unread_bytes > UNREAD_BYTES:
            self.lost(f"node {self.node} has left {self._unread_bytes} bytes of plans unread")
        entry = pb.NodeEntry(kind=kind, plan=plan, payload=payload)
        self.outbox.put(pb.NodesJoinResponse(entries=pb.NodeEntries(entries=[entry])))

    def standings(self) -> list[Standing]:
        return self._standings

    def print_stacks(self) -> None:
        self.outbox.put(pb.NodesJoinResponse(stacks=pb.NodeStacks()))

    def stop(self) -> None:
        """The node ends, too, in good order."""
        self._stopped = True
        self.outbox.close()

    def join(self) -> None:
        self.joined = True
        logger.info("node %d has joined", self.node)
        self.outbox.put(pb.NodesJoinResponse(welcome=pb.NodeWelcome(protocol_version=PROTOCOL_VERSION)))
        for rank in self.numbers:
            self._tell(rank, Loading(FIRST, 0.0))

    def hear(self, request: pb.NodesJoinRequest) -> None:
        """What the node says. Raises ProtocolError for what it may not."""
        try:
            self._standings = [
                Standing(rank, each.moves, Place(each.place), each.stopped)
                for rank, each in zip(self.numbers, request.standings, strict=True)
            ]
        except ValueError as error:
            raise ProtocolError(f"where the ranks of node {self.node} are cannot be told: {error}") from error
        if request.WhichOneof("message") != "told":
            return
        rank, message = request.told.rank, decode(request.told.message)
        if rank not in self.numbers or not isinstance(message, Loading | Ready | Failed | Ended | ResetDone):
            raise ProtocolError(f"node {self.node} speaks for rank {rank}: {request.told.message[:100]!r}")
        self._tell(rank, message)

    def lost(self, cause: str) -> None:
        """The group cannot go on; said again, or once it has been stopped, it changes nothing."""
        if not self._stopped:
            self._fail(GroupFailed(cause))

    def _next(self, messages: deque[pb.NodesJoinResponse]) -> pb.NodesJoinResponse:
        """The next message; entries that wait together travel together."""
        message = messages.popleft()
        size = sum(len(entry.payload) for entry in message.entries.entries)
        while message.HasField("entries") and messages and messages[0].HasField("entries"):
            (entry,) = messages[0].entries.entries
            if size + len(entry.payload) > MERGED_BYTES:
                break
            message.entries.entries.append(entry)
            size += len(entry.payload)
            messages.popleft()
        self._unread_bytes -= size
        return message
