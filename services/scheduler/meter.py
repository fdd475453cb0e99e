"""How often something happens."""

import math

WINDOW_S = 10.0


class Meter:
    """Events per second, over about the last `WINDOW_S`."""

    def __init__(self, now: float) -> None:
        self._started = self._at = now
        self._weight = 0.0  # of past events, each fading by 1/e in a window

    def count(self, events: int, now: float) -> None:
        self._fade(now)
        self._weight += events

    def per_second(self, now: float) -> float:
        """0 before the first event."""
        self._fade(now)
        observed_s = WINDOW_S * -math.expm1((self._started - now) / WINDOW_S)  # less than a window at first
        return self._weight / max(observed_s, 1.0)

    def _fade(self, now: float) -> None:
        self._weight *= math.exp((self._at - now) / WINDOW_S)
        self._at = now
