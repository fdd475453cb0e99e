"""What a rank tells its supervisor, one packet a message over a Unix socket; the end of the socket is the end of the rank."""

import json
import socket
import struct
from dataclasses import asdict, dataclass

from services.worker.engine.interface import Facts, Memory
from shared.protocol.plan import Int32s, ids_from_bytes, ids_to_bytes

MAX_PACKET_BYTES = 1 << 17
_DONE = struct.Struct("<qqqq")


@dataclass(frozen=True)
class Loading:
    phase: str
    progress: float


@dataclass(frozen=True)
class Ready:
    facts: Facts
    memory: Memory


@dataclass(frozen=True)
class Failed:
    """The rank ends; `config` tells a setting or model that does not fit from a fault, `peer` that another rank has the fault."""

    cause: str
    config: bool
    peer: bool = False


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
    ids: Int32s


Message = Loading | Ready | Failed | ResetDone | Done


def encode(message: Message) -> bytes:
    match message:
        case Done():
            return b"D" + _DONE.pack(message.plan, message.start_us, message.end_us, message.idle_us) + ids_to_bytes(message.ids)
        case Ready():
            return b"R" + json.dumps(asdict(message)).encode()
        case Loading():
            return b"L" + json.dumps(asdict(message)).encode()
        case Failed():
            return b"F" + json.dumps({**asdict(message), "cause": message.cause[:10_000]}).encode()
        case ResetDone():
            return b"A" + json.dumps(asdict(message)).encode()


def decode(packet: bytes) -> Message:
    kind, body = packet[:1], packet[1:]
    if kind == b"D":
        plan, start_us, end_us, idle_us = _DONE.unpack_from(body)
        return Done(plan, start_us, end_us, idle_us, ids_from_bytes(body[_DONE.size :]))
    content = json.loads(body)
    if kind == b"R":
        facts = content["facts"]
        return Ready(Facts(**{**facts, "eos_ids": tuple(facts["eos_ids"])}), Memory(**content["memory"]))
    by_kind: dict[bytes, type[Loading] | type[Failed] | type[ResetDone]] = {b"L": Loading, b"F": Failed, b"A": ResetDone}
    return by_kind[kind](**content)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
