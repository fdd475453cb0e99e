"""One rank: a process that reads the ring and drives its engine, nothing else. No gRPC, no asyncio; started by the supervisor."""

import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

from services.worker.distributed.board import Mark, Place
from services.worker.engine.interface import Engine, Progress, RankSpec, Step
from services.worker.messages import Done, Failed, Loading, Message, Ready, ResetDone, encode
from services.worker.ring import Kind, RingReader
from shared import logging as logs
from shared.errors import ConfigError, LockstepError, PeerLost
from shared.process import die_with_parent
from shared.protocol.plan import Int32s, decode

logger = logging.getLogger(__name__)

PROGRESS_EVERY_S = 0.1


def spec_to_json(spec: RankSpec) -> str:
    return json.dumps(asdict(spec), default=str)


def spec_from_json(text: str) -> RankSpec:
    content = json.loads(text)
    for name in ("model", "script"):
        content[name] = None if content[name] is None else Path(content[name])
    assert content.keys() == {each.name for each in fields(RankSpec)}
    return RankSpec(**content)


def build(spec: RankSpec, progress: Progress) -> Engine:
    """The engine that the spec names; each is imported by itself, since only one of them may cost the import of torch."""
    if spec.engine == "scripted":
        from services.worker.engine.scripted import ScriptedEngine

        return ScriptedEngine(spec, progress)
    from services.worker.engine.engine import TorchEngine

    return TorchEngine(spec, progress)


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


def execute(engine: Engine, reader: RingReader, reporter: Reporter, mark: Mark, answers: bool) -> None:
    """Executes the ring strictly in order until STOP. Only the rank that `answers` sends results; all answer a reset."""
    mark.move(Place.IDLE)
    plans: dict[int, tuple[Int32s, Step | None, int]] = {}  # words, the step once begun, iterations left
    last_end_us = 0
    while True:
        entry = reader.read()
        if entry.kind == Kind.STOP:
            return
        if entry.kind == Kind.RESET:
            plans.clear()
            engine.reset()
            reporter.send(ResetDone(entry.plan))
            continue
        if entry.kind == Kind.PLAN:
            plans[entry.plan] = (entry.payload, None, 0)
            continue
        mark.move(Place.COMPUTING)
        start_us = time.monotonic_ns() // 1000
        words, step, left = plans.pop(entry.plan)
        if step is None:
            plan = decode(words.data.cast("B"))
            step, left = engine.begin(plan, words), plan.iterations
        ids = step.run()
        mark.move(Place.IDLE)
        if left > 1:
            plans[entry.plan] = (words, step, left - 1)
        end_us = time.monotonic_ns() // 1000
        if answers:
            reporter.send(Done(entry.plan, start_us, end_us, start_us - last_end_us if last_end_us else 0, ids))
        last_end_us = end_us


def main() -> None:
    spec = spec_from_json(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole foreground group; the supervisor decides when we end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent(spec.parent_pid, signal.SIGKILL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logs.configure(f"rank-{spec.rank}", spec.log_level, "console")
    reporter = Reporter(spec.socket_fd)
    try:
        engine = build(spec, reporter.progress)
        reporter.send(Ready(engine.facts, engine.memory))
        reader = RingReader(spec.ring_fd, spec.bell_fd, spec.rank, spec.ranks)
        execute(engine, reader, reporter, Mark(spec.board_fd, spec.rank), answers=spec.rank == 0)
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
