"""How often something happens, how fast work is done, and how long something takes."""

import math

WINDOW_S = 10.0
BUSY_WINDOW_S = 1.0
MEAN_OF = 32  # values


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


class Throughput:
    """Tokens per second of busy time, over about the last `BUSY_WINDOW_S` of it: what could be done, however little was asked for."""

    def __init__(self) -> None:
        self._tokens = self._busy_s = 0.0

    def count(self, tokens: int, busy_s: float) -> None:
        fade = math.exp(-busy_s / BUSY_WINDOW_S)
        self._tokens = self._tokens * fade + tokens
        self._busy_s = self._busy_s * fade + busy_s

    @property
    def per_second(self) -> float:
        """0 before the first count."""
        return self._tokens / self._busy_s if self._busy_s else 0.0


class Mean:
    """Of about the last `MEAN_OF` values, however long ago they were."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def count(self, value: float) -> None:
        fade = 1 - 1 / MEAN_OF
        self._sum = self._sum * fade + value
        self._weight = self._weight * fade + 1

    @property
    def value(self) -> float:
        """0 before the first."""
        return self._sum / self._weight if self._weight else 0.0
