"""In which order the iterations of a group's plans are launched."""

from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

P = TypeVar("P")


@dataclass
class _Entry(Generic[P]):
    number: int  # in the order in which plans came
    plan: P
    iterations: int  # not yet launched


class LaunchOrder(Generic[P]):
    """Plans run as they came, except that one which jumps goes before their next iteration, a burst's included.

    At most one jumps between two iterations of plans that came before it: newcomers never stop those who run. Plans that came after a
    jump build on it, and so wait for it.
    """

    def __init__(self) -> None:
        self._in_order: deque[_Entry[P]] = deque()
        self._jumps: deque[_Entry[P]] = deque()
        self._jumped = False  # the last iteration launched was a jump's
        self._numbers = count()

    def __len__(self) -> int:
        """Plans that are not launched in full."""
        return len(self._in_order) + len(self._jumps)

    def add(self, plan: P, iterations: int, jump: bool) -> None:
        (self._jumps if jump else self._in_order).append(_Entry(next(self._numbers), plan, iterations))

    def head(self) -> P | None:
        """Whose iteration comes next."""
        return self._next()[0].plan if len(self) else None

    def advance(self) -> None:
        """The head's next iteration is launched."""
        queue = self._next()
        queue[0].iterations -= 1
        if not queue[0].iterations:
            queue.popleft()
        self._jumped = queue is self._jumps

    def clear(self) -> None:
        self._in_order.clear()
        self._jumps.clear()
        self._jumped = False

    def _next(self) -> deque[_Entry[P]]:
        if not self._jumps or not self._in_order:
            return self._jumps or self._in_order
        overtakes = self._in_order[0].number < self._jumps[0].number
        return self._in_order if overtakes and self._jumped else self._jumps
