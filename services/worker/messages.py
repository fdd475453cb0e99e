"""What a rank tells its supervisor, one packet a message over a Unix socket; the end of the socket is the end of the rank.

One node's supervisor passes them on to another's in the same packets, the end of a rank as a message of its own.
"""

import json
import socket
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from services.worker.distributed.sums import Sums
from services.worker.engine.interface import Facts, Memory
from shared.errors import ProtocolError
from shared.protocol.logprobs import LOGPROB, Logprobs, logprobs_from_bytes
from shared.protocol.plan import Int32s, ids_from_bytes, ids_to_bytes

MAX_PACKET_BYTES = 1 << 17
_DONE = struct.Struct("<qqqqq")
_SCORED = struct.Struct("<q")
RECORDS_PER_PACKET = MAX_PACKET_BYTES // 2 // LOGPROB.itemsize


@dataclass(frozen=True)
class Loading:
    phase: str
    progress: float


@dataclass(frozen=True)
class Ready:
    facts: Facts
    memory: Memory
    sums: Sums = field(default_factory=Sums)


@dataclass(frozen=True)
class Failed:
    """The rank ends; `config` tells a setting or model that does not fit from a fault, `peer` that another rank has the fault."""

    cause: str
    config: bool
    peer: bool = False


@dataclass(frozen=True)
class Ended:
    """What the supervisor makes of the end of a socket: the rank's process has ended, `how` says in which way."""

    how: str


@dataclass(frozen=True)
class ResetDone:
    number: int


@dataclass(frozen=True)
class Done:
    """One iteration is finished. Times on the host's monotonic clock, in microseconds."""

    plan: int
    start_us: int
    end_us: int
    idle_us: int  # since the iteration before, with nothing to do
    launch_us: int  # that its launch took, and before the first of a plan the plan's reading
    ids: Int32s


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of an iteration whose Done follows; in pieces, where they are many."""

    plan: int
    records: Logprobs


Message = Loading | Ready | Failed | Ended | ResetDone | Done | Scored


def scored(plan: int, records: Logprobs) -> Iterator[Scored]:
    """The messages that carry so many records."""
    for at in range(0, len(records), RECORDS_PER_PACKET):
        yield Scored(plan, records[at : at + RECORDS_PER_PACKET])


def encode(message: Message) -> bytes:
    match message:
        case Done():
            times = message.start_us, message.end_us, message.idle_us, message.launch_us
            return b"D" + _DONE.pack(message.plan, *times) + ids_to_bytes(message.ids)
        case Scored():
            return b"S" + _SCORED.pack(message.plan) + message.records.tobytes()
        case Ready():
            return b"R" + json.dumps(asdict(message)).encode()
        case Loading():
            return b"L" + json.dumps(asdict(message)).encode()
        case Failed():
            return b"F" + json.dumps({**asdict(message), "cause": message.cause[:10_000]}).encode()
        case Ended():
            return b"E" + json.dumps(asdict(message)).encode()
        case ResetDone():
            return b"A" + json.dumps(asdict(message)).encode()


def decode(packet: bytes) -> Message:
    """Raises ProtocolError for what is none."""
    try:
        return _decoded(packet)
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise ProtocolError(f"no message of a rank: {packet[:100]!r}") from error


def _decoded(packet: bytes) -> Message:
    kind, body = packet[:1], packet[1:]
    if kind == b"D":
        plan, start_us, end_us, idle_us, launch_us = _DONE.unpack_from(body)
        return Done(plan, start_us, end_us, idle_us, launch_us, ids_from_bytes(body[_DONE.size :]))
    if kind == b"S":
        return Scored(_SCORED.unpack_from(body)[0], logprobs_from_bytes(body[_SCORED.size :]))
    content = json.loads(body)
    if kind == b"R":
        facts = content["facts"]
        return Ready(Facts(**{**facts, "eos_ids": tuple(facts["eos_ids"])}), Memory(**content["memory"]), Sums.read(content["sums"]))
    by_kind: dict[bytes, type[Loading] | type[Failed] | type[Ended] | type[ResetDone]]
    by_kind = {b"L": Loading, b"F": Failed, b"E": Ended, b"A": ResetDone}
    return by_kind[kind](**content)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
