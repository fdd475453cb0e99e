import pytest

from services.scheduler.meter import MEAN_OF, Mean, Meter, Throughput


def test_a_steady_rate_is_found_and_forgotten() -> None:
    meter = Meter(now=0.0)
    assert meter.per_second(0.0) == 0.0
    for tenth in range(1, 301):
        meter.count(2, tenth / 10)
        if tenth > 20:
            assert meter.per_second(tenth / 10) == pytest.approx(20, rel=0.05)
    assert meter.per_second(130.0) < 0.01


def test_throughput_is_of_busy_time_and_follows_changes() -> None:
    throughput = Throughput()
    assert throughput.per_second == 0.0
    for _ in range(10):
        throughput.count(500, 0.1)
    assert throughput.per_second == pytest.approx(5_000)
    for _ in range(100):
        throughput.count(100, 0.1)
    assert throughput.per_second == pytest.approx(1_000, rel=0.01)


def test_a_mean_follows_changes() -> None:
    mean = Mean()
    assert mean.value == 0.0
    mean.count(5.0)
    mean.count(3.0)
    assert mean.value == pytest.approx(4.0, rel=0.02)
    for _ in range(10 * MEAN_OF):
        mean.count(7.0)
    assert mean.value == pytest.approx(7.0, rel=0.001)
