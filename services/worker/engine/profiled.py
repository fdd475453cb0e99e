"""An engine that torch's profiler can look into: SIGUSR2 to a rank records its next decode steps as a trace in a folder.

A trace holds every kernel with its begin and end, those of replayed graphs too; `python -m benchmarks profile` reads it, and so do the
viewers of Chrome's trace format.
"""

import logging
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from services.worker.engine.interface import Engine, Flight, Step
from shared.protocol.plan import Int32s, Plan

logger = logging.getLogger(__name__)

SKIPPED = 8  # decode steps after the signal, until those launched before have settled
RECORDED = 16


class ProfiledEngine:
    """Another engine, with a trace `FOLDER/rank-R-N.json` for the N-th signal."""

    def __init__(self, engine: Engine, folder: Path, rank: int) -> None:
        self.facts, self.memory = engine.facts, engine.memory
        self._engine, self._folder, self._rank = engine, folder, rank
        self._asked = self._written = 0
        self._steps = 0  # decode steps since the signal that is being answered
        self._profile: profile | None = None
        folder.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGUSR2, self._on_signal)
        signal.siginterrupt(signal.SIGUSR2, False)  # a rank that waits for plans goes on waiting

    def _on_signal(self, *_: object) -> None:
        self._asked += 1

    def reset(self) -> None:
        self._engine.reset()

    def begin(self, plan: Plan, words: Int32s) -> Step:
        step = self._engine.begin(plan, words)
        return _ProfiledStep(self, step) if len(plan.decode_slots) and not len(plan.prefill_slots) else step

    def launch(self, step: Step) -> Flight:
        """A decode step's iteration."""
        if self._asked == self._written:
            return step.launch()
        self._steps += 1
        if self._steps == SKIPPED + 1:
            self._start()
        flight = step.launch()
        if self._steps == SKIPPED + RECORDED:
            self._stop()
        return flight

    def _start(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile = profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU])
        self._profile.start()

    def _stop(self) -> None:
        assert self._profile is not None, "it was started some steps ago"
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        path = self._folder / f"rank-{self._rank}-{self._written}.json"
        self._profile.export_chrome_trace(str(path.with_suffix(".new.json")))
        path.with_suffix(".new.json").replace(path)  # in one step: a reader sees the whole file or none
        logger.info("%d decode steps are in %s", RECORDED, path)
        self._profile, self._steps = None, 0
        self._written += 1


@dataclass(frozen=True)
class _ProfiledStep:
    engine: ProfiledEngine
    step: Step

    def launch(self) -> Flight:
        return self.engine.launch(self.step)
