"""An engine that torch's profiler can look into: a signal to a rank records its next steps as a trace in a folder, SIGUSR2 those that
decode and nothing else, SIGRTMIN those with prefill.

A trace holds every kernel with its begin and end, those of replayed graphs too; `python -m benchmarks profile` reads it, and so do the
viewers of Chrome's trace format.
"""

import logging
import signal
from collections import Counter
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


class ProfiledEngine:
    """Another engine, with a trace `FOLDER/rank-R-KIND-N.json` for the N-th signal of a kind."""

    def __init__(self, engine: Engine, folder: Path, rank: int) -> None:
        self.facts, self.memory, self.sums = engine.facts, engine.memory, engine.sums
        self._engine, self._folder, self._rank = engine, folder, rank
        self._asked, self._written = Counter[Kind](), Counter[Kind]()
        self._steps = 0  # of the kind since the signal that is being answered
        self._profile: profile | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for kind in (DECODE, PREFILL):
            signal.signal(kind.signal, lambda *_, kind=kind: self._asked.update([kind]))
            signal.siginterrupt(kind.signal, False)  # a rank that waits for plans goes on waiting

    def reset(self) -> None:
        self._engine.reset()

    def begin(self, plan: Plan, words: Int32s) -> Step:
        step = self._engine.begin(plan, words)
        return _ProfiledStep(self, step, PREFILL if len(plan.prefill_slots) else DECODE) if plan.rows else step

    def launch(self, step: Step, kind: Kind) -> Flight:
        """An iteration of a step of this kind."""
        if self._asked[kind] == self._written[kind]:
            return step.launch()
        self._steps += 1
        if self._steps == kind.skipped + 1:
            self._start()
        flight = step.launch()
        if self._steps == kind.skipped + kind.recorded:
            self._stop(kind)
        return flight

    def _start(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile = profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU])
        self._profile.start()

    def _stop(self, kind: Kind) -> None:
        assert self._profile is not None, "it was started some steps ago"
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        path = self._folder / f"rank-{self._rank}-{kind.name}-{self._written[kind]}.json"
        self._profile.export_chrome_trace(str(path.with_suffix(".new.json")))
        path.with_suffix(".new.json").replace(path)  # in one step: a reader sees the whole file or none
        logger.info("%d %s steps are in %s", kind.recorded, kind.name, path)
        self._profile, self._steps = None, 0
        self._written[kind] += 1


@dataclass(frozen=True)
class _ProfiledStep:
    engine: ProfiledEngine
    step: Step
    kind: Kind

    def launch(self) -> Flight:
        return self.engine.launch(self.step, self.kind)
