"""When a group is left alone, and for how long."""

import pytest

from services.scheduler.health import FIRST_S, LAST_S, MAX_FAILURES, Health


def test_a_group_that_fails_each_trial_is_tried_for_ever_each_time_later_up_to_a_bound() -> None:
    """2,000 failures are 8 hours: 2**2000 is no number of seconds."""
    health, now, pauses = Health(), 0.0, []
    for _ in range(MAX_FAILURES - 1):
        assert not health.fail(now)
    for _ in range(2_000):
        assert health.fail(now)
        assert not health.fail(now)  # what was on its way
        pauses.append(health.ejected_until - now)
        now = health.ejected_until
        assert health.on_trial(now)
    assert pauses[:6] == pytest.approx([FIRST_S, 2, 4, 8, LAST_S, LAST_S])
    assert pauses[-1] == pytest.approx(LAST_S)
    health.succeed()
    assert health.is_well
    health.eject(now)
    assert health.ejected_until - now == pytest.approx(FIRST_S)
