"""The rank's loop with an engine whose iterations take their time: what is launched ahead, and in which order results come."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from services.worker.distributed.board import Mark
from services.worker.distributed.sums import Sums
from services.worker.engine.interface import LAUNCH_AHEAD, Facts, Flight, Memory
from services.worker.messages import MAX_PACKET_BYTES, Done, Message, ResetDone, decode, socket_pair
from services.worker.rank import Loop, Reporter
from services.worker.ring import Kind, RingReader, RingWriter, create_ring
from shared.protocol.logprobs import NO_LOGPROBS, Logprobs
from shared.protocol.plan import Int32s, Plan, encode

LOOKS = 3  # that an iteration is in the air


@dataclass
class SlowFlight:
    engine: "SlowEngine"
    result: Int32s
    looks: int = 0

    def landed(self) -> bool:
        self.looks += 1
        return self.looks > LOOKS

    def ids(self) -> Int32s:
        self.engine.events.append("land")
        return self.result

    def logprobs(self) -> Logprobs:
        return NO_LOGPROBS.copy()


@dataclass
class SlowEngine:
    """Plays the plan's decode slots, counted up by iteration, some time after each launch."""

    facts: Facts = field(default_factory=lambda: Facts(2, 16, 100, (2,)))
    memory: Memory = field(default_factory=lambda: Memory(0, 0))
    sums: Sums = field(default_factory=Sums)
    events: list[str] = field(default_factory=list)
    launched: int = 0

    def reset(self) -> None:
        self.events.append("reset")

    def begin(self, plan: Plan, words: Int32s) -> "SlowStep":
        return SlowStep(self, plan)


@dataclass
class SlowStep:
    engine: SlowEngine
    plan: Plan

    def launch(self) -> Flight:
        self.engine.events.append("launch")
        self.engine.launched += 1
        return SlowFlight(self.engine, self.plan.decode_slots + 10 * self.engine.launched)


@dataclass
class Rig:
    writer: RingWriter
    loop: Loop
    link: socket.socket
    engine: SlowEngine

    def run(self) -> list[Message]:
        """Until STOP, which is written here -> what the supervisor is told."""
        self.writer.write(Kind.STOP, 0)
        self.loop.run()
        self.link.setblocking(False)
        told = []
        while True:
            try:
                told.append(decode(self.link.recv(MAX_PACKET_BYTES)))
            except BlockingIOError:
                return told


@pytest.fixture
def rig() -> Iterator[Rig]:
    ring, bell, engine = create_ring(), os.eventfd(0), SlowEngine()
    ours, theirs = socket_pair()
    reporter = Reporter(theirs.detach())
    yield Rig(RingWriter(ring, [bell]), Loop(engine, RingReader(ring, bell, 0, 1), reporter, Mark(None), True), ours, engine)
    ours.close()
    reporter._socket.close()
    for descriptor in (ring, bell):
        os.close(descriptor)


def plan(number: int, *slots: int, iterations: int = 1) -> bytes:
    ids = np.array(slots, dtype=np.int32)
    return encode(Plan(number, decode_slots=ids, decode_flags=np.ones_like(ids), iterations=iterations))


def test_results_come_in_the_order_of_the_launches_and_few_are_in_the_air(rig: Rig) -> None:
    rig.writer.write(Kind.PLAN, 1, plan(1, 3, 4, iterations=3))
    rig.writer.write(Kind.PLAN, 2, plan(2, 5))
    for number in (1, 1, 2, 1):
        rig.writer.write(Kind.RUN, number)
    told = rig.run()
    assert [(each.plan, each.ids.tolist()) for each in told if isinstance(each, Done)] == [
        (1, [13, 14]),
        (1, [23, 24]),
        (2, [35]),
        (1, [43, 44]),
    ]
    in_the_air = np.cumsum([1 if event == "launch" else -1 for event in rig.engine.events])
    assert in_the_air.max() == LAUNCH_AHEAD  # as many are launched ahead, and no more
    assert in_the_air[-1] == 0


def test_one_iteration_begins_where_the_one_before_ends(rig: Rig) -> None:
    rig.writer.write(Kind.PLAN, 1, plan(1, 3, iterations=3))
    for _ in range(3):
        rig.writer.write(Kind.RUN, 1)
    first, second, third = (each for each in rig.run() if isinstance(each, Done))
    for before, after in ((first, second), (second, third)):
        assert after.start_us >= before.end_us
        assert after.idle_us == after.start_us - before.end_us


def test_a_reset_waits_for_what_is_in_the_air(rig: Rig) -> None:
    rig.writer.write(Kind.PLAN, 1, plan(1, 3))
    rig.writer.write(Kind.RUN, 1)
    rig.writer.write(Kind.RESET, 7)
    told = rig.run()
    assert [type(each) for each in told] == [Done, ResetDone]
    assert rig.engine.events == ["launch", "land", "reset"]
