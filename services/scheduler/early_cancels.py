"""Cancels that have come before the Submit of their request, or after its end: nobody knows which."""

from collections import OrderedDict

from services.scheduler.requests import Key

MAX_CANCELS = 10_000  # that are remembered; the oldest go first


class EarlyCancels:
    def __init__(self) -> None:
        self._attempts: OrderedDict[Key, int] = OrderedDict()  # the highest that was cancelled

    def add(self, key: Key, attempt: int) -> None:
        """This attempt and those below it are cancelled, of a request that is not here."""
        self._attempts[key] = max(attempt, self._attempts.get(key, 0))
        if len(self._attempts) > MAX_CANCELS:
            self._attempts.popitem(last=False)

    def take(self, key: Key, attempt: int) -> bool:
        """Whether this attempt, which has come now, was cancelled before; then it is forgotten."""
        return self._attempts.pop(key, 0) >= attempt
