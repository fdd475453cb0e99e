import pytest

from services.scheduler.meter import Meter


def test_a_steady_rate_is_found_and_forgotten() -> None:
    meter = Meter(now=0.0)
    assert meter.per_second(0.0) == 0.0
    for tenth in range(1, 301):
        meter.count(2, tenth / 10)
        if tenth > 20:
            assert meter.per_second(tenth / 10) == pytest.approx(20, rel=0.05)
    assert meter.per_second(130.0) < 0.01
