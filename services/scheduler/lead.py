"""How far ahead plans are sent: measured time of work, not a number of plans. All times in microseconds.

The device must find its next plan when it ends one; plans further ahead only delay what comes after them. So the work queued
behind the plan that now runs should last just longer than the way of a result here and of a plan back. Two things ease that:
short steps go in bursts, since a plan costs more than such a step; and a new request's first prefill jumps the queue.
"""

from bisect import bisect_left, insort
from collections import deque

from shared.protocol.plan import MAX_BURST

WINDOW_PLANS = 400
UNKNOWN_STEP_US = 10_000  # before the first measurement
SMOOTHING = 0.1
STARVED_US = 20  # less is noise
MARGIN_STEP_US = 100
MARGIN_DECAY = 0.998
MAX_MARGIN_US = 2_000  # more would cost time to first token where no plan may jump
MAX_MARGIN_WITH_JUMP_US = 15_000  # there it costs only the second token of a newcomer, and it covers gaps of a busy host
MAX_OUTSTANDING_PLANS = 64
JUMP_SHARE = 0.05  # of the device's time, for plans that jump: alone, a prefill reads all weights, which in a step with others is free
MAX_JUMP_CREDIT_US = 50_000  # several newcomers at once
PLAN_US = 2_000  # of device time that a plan should bring: several times what it costs to plan, send and receive
PLAN_US_PER_GROUP = 1_000  # with several groups, so that one process has at most 1,000 plans a second


class StepTimes:
    """Time of a step by its size, as moving averages over powers of two of decode rows and prefill tokens."""

    def __init__(self) -> None:
        self._average: dict[tuple[int, int], float] = {}

    def observe(self, rows: int, prefill_tokens: int, step_us: int) -> None:
        size = (rows.bit_length(), prefill_tokens.bit_length())
        before = self._average.get(size, step_us)
        self._average[size] = before + SMOOTHING * (step_us - before)

    def estimate(self, rows: int, prefill_tokens: int) -> int:
        """Of a size never seen: as the nearest that was."""
        size = (rows.bit_length(), prefill_tokens.bit_length())
        if size not in self._average:
            if not self._average:
                return UNKNOWN_STEP_US
            size = min(self._average, key=lambda other: abs(other[0] - size[0]) + abs(other[1] - size[1]))
        return max(int(self._average[size]), 1)


class Lead:
    """The rule: send while (work outstanding - its oldest plan) < round trip + margin. Each switch turns one part of it off."""

    def __init__(self, overlap: bool, bursts: bool = True, jump: bool = True) -> None:
        self._overlap, self._bursts, self._jump = overlap, bursts, jump and overlap
        self._max_margin_us = MAX_MARGIN_WITH_JUMP_US if self._jump else MAX_MARGIN_US
        self._plan_us = PLAN_US
        self._jump_credit_us = float(MAX_JUMP_CREDIT_US)
        self._round_trips: deque[int] = deque()
        self._sorted: list[int] = []
        self.round_trip_us = 0
        self.margin_us = float(MARGIN_STEP_US)

    def share(self, groups: int) -> None:
        """The scheduler's process plans for so many groups."""
        self._plan_us = max(PLAN_US, groups * PLAN_US_PER_GROUP)

    def may_send(self, outstanding: int, queued_us: int) -> bool:
        """outstanding: plans; queued_us: the estimates of all of them but the oldest."""
        if not outstanding:
            return True
        return self._overlap and outstanding < MAX_OUTSTANDING_PLANS and queued_us < self.target_us

    def may_jump(self, outstanding: int, jumping_us: int) -> bool:
        """jumping_us: the estimates of the outstanding plans that jump. With less than two outstanding plans there is no queue."""
        may = self._jump and 2 <= outstanding < MAX_OUTSTANDING_PLANS and jumping_us < self.target_us
        return may and self._jump_credit_us > 0

    def on_jump(self, estimate_us: int) -> None:
        """A plan jumps."""
        self._jump_credit_us -= estimate_us

    def on_computed(self, busy_us: int) -> None:
        """The device has computed for so long."""
        self._jump_credit_us = min(self._jump_credit_us + JUMP_SHARE * busy_us, MAX_JUMP_CREDIT_US)

    def burst(self, step_us: int) -> int:
        """Iterations of a plan without prefill. They save messages, and cover no distance that more plans would not."""
        return min(-(-self._plan_us // step_us), MAX_BURST) if self._bursts else 1

    @property
    def target_us(self) -> float:
        return self.round_trip_us + self.margin_us

    def on_result(self, round_trip_us: int, late_us: int) -> None:
        """round_trip_us: result seen - plan sent - hold. late_us: the device waited so long for a plan that could have been there."""
        self._round_trips.append(round_trip_us)
        insort(self._sorted, round_trip_us)
        if len(self._round_trips) > WINDOW_PLANS:
            del self._sorted[bisect_left(self._sorted, self._round_trips.popleft())]
        # A low percentile: a high one would count our own queue and every hiccup, and so run away.
        self.round_trip_us = max(self._sorted[len(self._sorted) // 10], 0)
        if late_us > STARVED_US:
            self.margin_us = min(self.margin_us + min(late_us, self.margin_us + MARGIN_STEP_US), self._max_margin_us)
        else:
            self.margin_us *= MARGIN_DECAY
