"""Whether a group is of use: its stream may live, and yet every row fails, or no plan is ever answered. Such a group is ejected: requests
go there only where no other group takes them. Judged by what it returns, never by a question of its own.

    well --failures in a row, or a plan that is overdue--> ejected --after a while--> on trial --a token--> well
                                                              ^--a failure, for twice as long--'
"""

MAX_FAILURES = 3  # in a row: one request that fails wherever it is computed does not do that to a group that others use, too
FIRST_S, LAST_S = 1.0, 15.0  # ejected for so long, doubled each time


class Health:
    """Of the group of one name at one worker, over all of its streams."""

    def __init__(self) -> None:
        self.failures = 0  # in a row: results in which every row failed, streams that broke while plans were on their way
        self.ejections = 0  # since it was well
        self.ejected_until = 0.0  # the last of them, on the clock of `now`
        self._ejected_s = 0.0  # for so long

    @property
    def is_well(self) -> bool:
        return not self.ejections

    def on_trial(self, now: float) -> bool:
        """Whether it was left alone for long enough to be asked again, one request at a time."""
        return not self.is_well and now >= self.ejected_until

    def succeed(self) -> None:
        """It has computed a token: a part of a prompt, which has none, may be all that it can."""
        self.failures = self.ejections = 0
        self._ejected_s = 0.0

    def fail(self, now: float) -> bool:
        """Returns whether it is ejected for that. What had been on its way when it was ejected before tells nothing new."""
        self.failures += 1
        ejected = self.on_trial(now) or (self.is_well and self.failures >= MAX_FAILURES)
        if ejected:
            self.eject(now)
        return ejected

    def eject(self, now: float) -> None:
        self._ejected_s = min(max(2 * self._ejected_s, FIRST_S), LAST_S)
        self.ejected_until = now + self._ejected_s
        self.ejections += 1
