"""One rank: a process that reads the ring and drives its engine, nothing else. No gRPC, no asyncio; started by the supervisor."""

import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from services.worker.distributed.board import Mark, Place
from services.worker.engine.interface import LAUNCH_AHEAD, Engine, Flight, Progress, RankSpec, Step
from services.worker.messages import Done, Failed, Loading, Message, Ready, ResetDone, encode, scored
from services.worker.ring import Kind, RingReader
from shared import logging as logs
from shared.errors import ConfigError, LockstepError, PeerLost
from shared.process import die_with_parent, precise_sleeps, settle_heap
from shared.protocol.plan import Int32s, decode

logger = logging.getLogger(__name__)

PROGRESS_EVERY_S = 0.1
LOOK_EVERY_S = 10e-6  # for results and plans, while something is launched


def spec_to_json(spec: RankSpec) -> str:
    return json.dumps(asdict(spec), default=str)


def spec_from_json(text: str) -> RankSpec:
    content = json.loads(text)
    for name in ("model", "script", "profile_folder"):
        content[name] = None if content[name] is None else Path(content[name])
    assert content.keys() == {each.name for each in fields(RankSpec)}
    return RankSpec(**content)


def build(spec: RankSpec, progress: Progress) -> Engine:
    """The engine that the spec names; each is imported by itself, since only one of them may cost the import of torch."""
    if spec.engine == "scripted":
        from services.worker.engine.scripted import ScriptedEngine

        return ScriptedEngine(spec, progress)
    from services.worker.engine.engine import TorchEngine

    engine = TorchEngine(spec, progress)
    if spec.profile_folder is None:
        return engine
    from services.worker.engine.profiled import ProfiledEngine

    return ProfiledEngine(engine, spec.profile_folder, spec.rank)


class Reporter:
    """Sends messages to the supervisor; progress at most every PROGRESS_EVERY_S, but each new phase."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._phase, self._next_s = "", 0.0

    def send(self, message: Message) -> None:
        self._socket.sendall(encode(message))

    def progress(self, phase: str, part: float) -> None:
        now = time.monotonic()
        if phase != self._phase or now >= self._next_s:
            self._phase, self._next_s = phase, now + PROGRESS_EVERY_S
            self.send(Loading(phase, part))


@dataclass
class _Flying:
    plan: int
    launched_us: int
    launch_us: int  # that it took
    flight: Flight


class Loop:
    """Executes the ring strictly in order until STOP. Only the rank that `answers` sends results; all answer a reset.

    One thread looks at both ends, the ring and what the device has finished: what is launched ahead hides how often it looks.
    """

    def __init__(self, engine: Engine, reader: RingReader, reporter: Reporter, mark: Mark, answers: bool) -> None:
        self._engine, self._reader, self._reporter, self._mark, self._answers = engine, reader, reporter, mark, answers
        self._plans: dict[int, tuple[Int32s, Step | None, int]] = {}  # words, the step once begun, iterations left
        self._flying: deque[_Flying] = deque()
        self._last_end_us = 0

    def run(self) -> None:
        self._mark.move(Place.IDLE)
        while True:
            while self._flying and self._flying[0].flight.landed():
                self._land()
            if self._flying and self._reader.empty():
                time.sleep(LOOK_EVERY_S)
                continue
            entry = self._reader.read()
            if entry.kind == Kind.RUN:
                self._launch(entry.plan)
            elif entry.kind == Kind.PLAN:
                self._plans[entry.plan] = (entry.payload, None, 0)
            else:
                while self._flying:
                    self._land()
                if entry.kind == Kind.STOP:
                    return
                self._plans.clear()
                self._engine.reset()
                self._reporter.send(ResetDone(entry.plan))

    def _launch(self, number: int) -> None:
        while len(self._flying) >= LAUNCH_AHEAD:  # a rank that is behind the one whose results set the pace
            self._land()
        self._mark.move(Place.COMPUTING)
        launched_us = time.monotonic_ns() // 1000
        words, step, left = self._plans.pop(number)
        if step is None:
            plan = decode(words.data.cast("B"), again=True)  # after the supervisor
            step, left = self._engine.begin(plan, words), plan.iterations
        flight = step.launch()
        self._flying.append(_Flying(number, launched_us, time.monotonic_ns() // 1000 - launched_us, flight))
        if left > 1:
            self._plans[number] = (words, step, left - 1)

    def _land(self) -> None:
        """The oldest; waits for it."""
        flying = self._flying.popleft()
        ids = flying.flight.ids()
        end_us, last_end_us = time.monotonic_ns() // 1000, self._last_end_us or flying.launched_us
        start_us = max(flying.launched_us, last_end_us)  # the device takes one after the other
        if self._answers:
            for message in scored(flying.plan, flying.flight.logprobs()):
                self._reporter.send(message)
            self._reporter.send(Done(flying.plan, start_us, end_us, start_us - last_end_us, flying.launch_us, ids))
        self._last_end_us = end_us
        if not self._flying:
            self._mark.move(Place.IDLE)


def main() -> None:
    spec = spec_from_json(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole foreground group; the supervisor decides when we end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(spec.parent_pid, signal.SIGKILL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logs.configure(f"rank-{spec.rank}", spec.log_level, spec.log_format)
    reporter = Reporter(spec.socket_fd)
    try:
        engine = build(spec, reporter.progress)
        reporter.send(Ready(engine.facts, engine.memory, engine.sums))
        reader = RingReader(spec.ring_fd, spec.bell_fd, spec.local_rank, spec.local_ranks)
        precise_sleeps()
        settle_heap()
        Loop(engine, reader, reporter, Mark(spec.board_fd, spec.rank), answers=spec.rank == 0).run()
    except LockstepError as error:
        logger.debug("rank %d ends", spec.rank, exc_info=True)
        reporter.send(Failed(str(error), isinstance(error, ConfigError), isinstance(error, PeerLost)))
        os._exit(1)
    except Exception as error:  # the edge of the process: the supervisor ends the group and names the cause
        logger.exception("rank %d broke", spec.rank)
        reporter.send(Failed(f"{type(error).__name__}: {error}", config=False))
        os._exit(1)
    os._exit(0)  # torch's and gloo's threads may hold the interpreter back


if __name__ == "__main__":
    main()
