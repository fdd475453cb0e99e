"""What is not taken for load: more than may wait, or what could not start before its deadline. Told with when to ask again."""

from collections.abc import Sequence

from services.scheduler.ends import Rejected
from services.scheduler.group import Group
from services.scheduler.meter import Meter
from services.scheduler.requests import Request
from services.scheduler.waiting import WaitingQueue
from shared.protocol.generation_pb2 import REJECT_REASON_DEADLINE, REJECT_REASON_OVERLOADED

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


class Overload:
    """The limits on what waits, in all groups and for one."""

    def __init__(self, max_waiting_requests: int, max_waiting_tokens: int, now: float) -> None:
        self._max_waiting_requests, self._max_waiting_tokens = max_waiting_requests, max_waiting_tokens
        self._ended = Meter(now)

    def on_end(self, now: float) -> None:
        """A request has ended."""
        self._ended.count(1, now)

    def refuses(self, request: Request, held: WaitingQueue, groups: Sequence[Group], now: float) -> Rejected | None:
        """groups: all, of which those that drain take nothing new."""
        requests = len(held) + sum(len(group.waiting) for group in groups)
        tokens = held.tokens + sum(group.waiting.tokens for group in groups)
        if requests < self._max_waiting_requests and (not requests or tokens + request.length <= self._max_waiting_tokens):
            return _too_late(request, groups, now)
        rate = self._ended.per_second(now)
        retry_ms = _retry_ms(requests / rate if rate else 0.0)
        return Rejected(REJECT_REASON_OVERLOADED, f"{requests} requests of {tokens} tokens wait already", retry_ms)


def _too_late(request: Request, groups: Sequence[Group], now: float) -> Rejected | None:
    """Better refused now than given up when its deadline has passed. A group that is left out is idle, and no measure."""
    if request.deadline is None:
        return None
    takers = [group for group in groups if not group.draining]
    takers = [group for group in takers if group.health.is_well] or takers
    wait_s = min((group.wait_s() for group in takers), default=0.0)
    if now + wait_s < request.deadline:
        return None
    return Rejected(REJECT_REASON_DEADLINE, f"it would start in {wait_s:.1f} s, after its deadline", _retry_ms(wait_s))


def _retry_ms(wait_s: float) -> int:
    return round(min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S) * 1e3)
