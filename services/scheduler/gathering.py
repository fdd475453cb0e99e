"""How long newcomers wait for those that come with them, so that a crowd shares a step instead of having one each. In seconds.

A step with prefill reads all weights, and on a GPU may be launched without a graph, whatever its size. So while the group has work
anyhow, who comes close behind another waits a moment for those that follow; who comes alone never does.
"""

import math

CROWD_S = 0.001  # who comes so soon after another is of a crowd; so long nobody must come for it to be complete
MOST_S = 0.002  # that the first waits
STEP_SHARE = 0.5  # or so much of a step of those that run, where that is more
TIMER_S = 0.0005  # an event loop's timer comes so much too early or too late


class Gathering:
    """Told what comes and goes, it says how long newcomers wait. Never longer than the plans sent last, by their estimates: a group
    whose next plan had to be made of newcomers would run dry."""

    def __init__(self) -> None:
        self._last_at = -math.inf
        self._first_at: float | None = None  # of those that wait for others
        self._most_s = MOST_S
        self._dry_at = -math.inf  # a plan that is sent later finds the device idle

    def on_arrival(self, now: float, *, alone: bool, step_us: int) -> None:
        """alone: nobody waits yet. Behind others who wait for room, newcomers need no further waiting."""
        if alone and now - self._last_at < CROWD_S:
            self._first_at, self._most_s = now, max(MOST_S, STEP_SHARE * step_us / 1e6)
        self._last_at = now

    def on_sent(self, estimate_us: int, now: float) -> None:
        self._dry_at = max(self._dry_at, now) + estimate_us / 1e6

    def on_result(self, queued_us: int, round_trip_us: int, now: float) -> None:
        """Of the oldest plan. queued_us: the estimates of all plans that are still out."""
        self._dry_at = now + (queued_us - round_trip_us) / 1e6

    def wait_s(self, now: float) -> float:
        """How much longer newcomers wait; 0: not at all, which ends it."""
        if self._first_at is None:
            return 0.0
        wait_s = min(self._last_at + CROWD_S, self._first_at + self._most_s, self._dry_at) - now
        if wait_s < TIMER_S:
            self._first_at = None
            return 0.0
        return wait_s
