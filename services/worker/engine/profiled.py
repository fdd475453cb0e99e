"""An engine that torch's profiler can look into: a signal to a rank records its next steps as a trace in a folder, SIGUSR2 those that
decode and nothing else, SIGRTMIN those with prefill.

A trace holds every kernel with its begin and end, those of replayed graphs too; `python -m benchmarks profile` reads it, and so do the
viewers of Chrome's trace format. It also slows the host down, so what a step takes otherwise is told by the next signal after SIGRTMIN: of
decode steps, with nothing but an event before them and one after.
"""

import json
import logging
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from services.worker.engine.interface import Engine, Flight, Step
from shared.protocol.plan import Int32s, Plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kind:
    """Steps that are recorded after a signal; `skipped` before them, until those launched before have settled."""

    name: str
    signal: int
    skipped: int
    recorded: int


DECODE = Kind("decode", signal.SIGUSR2, skipped=8, recorded=16)
PREFILL = Kind("prefill", signal.SIGRTMIN, skipped=4, recorded=4)
TIMED = Kind("timed", signal.SIGRTMIN + 1, DECODE.skipped, DECODE.recorded)  # those of DECODE, not traced


class ProfiledEngine:
    """Another engine, with a file `FOLDER/rank-R-KIND-N.json` for the N-th signal of a kind: a trace, or of TIMED `{"us": of a step}`."""

    def __init__(self, engine: Engine, folder: Path, rank: int) -> None:
        self.facts, self.memory, self.sums = engine.facts, engine.memory, engine.sums
        self._engine, self._folder, self._rank = engine, folder, rank
        self._asked, self._written = Counter[Kind](), Counter[Kind]()
        self._steps = 0  # of the kind since the signal that is being answered
        self._recording: _Trace | _Clock | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for kind in (DECODE, PREFILL, TIMED):
            signal.signal(kind.signal, lambda *_, kind=kind: self._asked.update([kind]))
            signal.siginterrupt(kind.signal, False)  # a rank that waits for plans goes on waiting

    def reset(self) -> None:
        self._engine.reset()

    def begin(self, plan: Plan, words: Int32s) -> Step:
        step = self._engine.begin(plan, words)
        return _ProfiledStep(self, step, (PREFILL,) if len(plan.prefill_slots) else (DECODE, TIMED)) if plan.rows else step

    def launch(self, step: Step, kinds: Sequence[Kind]) -> Flight:
        """An iteration of a step that is of each of these kinds."""
        kind = next((each for each in kinds if self._asked[each] > self._written[each]), None)
        if kind is None:
            return step.launch()
        self._steps += 1
        if self._steps == kind.skipped + 1:
            self._recording = _Clock() if kind is TIMED else _Trace()
        flight = step.launch()
        if self._steps == kind.skipped + kind.recorded:
            self._write(kind)
        return flight

    def _write(self, kind: Kind) -> None:
        assert self._recording is not None, "it was started some steps ago"
        path = self._folder / f"rank-{self._rank}-{kind.name}-{self._written[kind]}.json"
        self._recording.write(path.with_suffix(".new.json"), kind.recorded)
        path.with_suffix(".new.json").replace(path)  # in one step: a reader sees the whole file or none
        logger.info("%d %s steps are in %s", kind.recorded, kind.name, path)
        self._recording, self._steps = None, 0
        self._written[kind] += 1


class _Trace:
    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile = profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU])
        self._profile.start()

    def write(self, path: Path, steps: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        self._profile.export_chrome_trace(str(path))


class _Clock:
    """The device's, from when it has done what was launched before until it has done what was launched since; on a CPU the host's."""

    def __init__(self) -> None:
        self._event, self._begin_s = torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else None, time.perf_counter()
        if self._event is not None:
            self._event.record()

    def write(self, path: Path, steps: int) -> None:
        us = 1e6 * (time.perf_counter() - self._begin_s)
        if self._event is not None:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            end.synchronize()
            us = 1e3 * self._event.elapsed_time(end)
        path.write_text(json.dumps({"us": us / steps}))


@dataclass(frozen=True)
class _ProfiledStep:
    engine: ProfiledEngine
    step: Step
    kinds: tuple[Kind, ...]

    def launch(self) -> Flight:
        return self.engine.launch(self.step, self.kinds)
