"""The start of a group, phase by phase: how far its ranks have come, and how long each phase took."""

import time

FIRST, READY = "starting ranks", "ready"  # the phases in which a start begins and ends


class Startup:
    """How far ranks have come: as far as the one that has entered the fewest phases."""

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[int, float, str]] = {}  # phases entered, progress in the last, and its name

    def expect(self, rank: int, phase: str) -> None:
        """The rank has not begun: `phase` says why."""
        self._ranks[rank] = (0, 0.0, phase)

    def advance(self, rank: int, phase: str, progress: float) -> None:
        entered, _, before = self._ranks.get(rank, (0, 0.0, ""))
        self._ranks[rank] = (entered + (phase != before), progress, phase)

    @property
    def slowest(self) -> tuple[str, float]:
        """Phase and progress of the rank that is behind."""
        _, progress, phase = min(self._ranks.values())
        return phase, progress


class PhaseTimes:
    """How long each phase of a group's start took, the current one so far."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}  # of the phases that are over
        self._phase, self._since = "", time.monotonic()
        self.progress = 0.0

    def advance(self, phase: str, progress: float) -> None:
        now = time.monotonic()
        if phase != self._phase:
            if self._phase:
                self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
            self._phase, self._since = phase, now
        self.progress = progress

    def seconds(self) -> dict[str, float]:
        """By phase, in their order; readable from any thread."""
        phase, seconds = self._phase, dict(self._seconds)
        if phase and phase != READY:
            seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - self._since
        return seconds
