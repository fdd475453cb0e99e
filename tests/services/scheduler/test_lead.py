"""Distance must cost the device no idle time, and a deep queue must cost newcomers none."""

from collections import deque
from dataclasses import replace

import pytest

from services.scheduler.group import Group, StepResult
from services.scheduler.lead import MAX_MARGIN_US, UNKNOWN_STEP_US, Lead, StepTimes
from shared.protocol.plan import Limits, Plan
from tests.services.scheduler.build import make_request
from tests.services.scheduler.device import Device

LIMITS = Limits(slots=2, pages=2001, page_size=16, max_length=16_000, max_step_tokens=64, vocab_size=50)


def simulate(step_us: int, delay_us: int, overlap: bool, steps: int = 1_000) -> tuple[float, int]:
    """One row decodes at `delay_us` each way, on a virtual clock. Returns the busy share of the device and the greatest depth, both
    over the second half."""
    now = free_at = 0.0  # microseconds
    device = Device(LIMITS, model=lambda ids, vocab_size: 7)
    device._read = lambda slot, position: 0  # type: ignore[method-assign]  # reading back every token would take minutes
    on_way: deque[tuple[float, StepResult]] = deque()

    def send(plan: Plan) -> None:
        nonlocal free_at
        arrived = now + delay_us
        start = max(arrived, free_at)
        result = replace(
            device.run(plan),
            start_us=round(start),
            end_us=round(start + step_us),
            idle_us=round(start - free_at),
            hold_us=round(start + step_us - arrived),
        )
        free_at = start + step_us
        on_way.append((free_at + delay_us, result))

    group = Group("group", LIMITS, 0, 64, overlap, send, lambda updated, at: None)
    group.submit(make_request(1, [1, 2, 3], steps + 200, ignore_eos=True), 0.0)
    half_at, depth = 0.0, 0
    for step in range(steps):
        now, result = on_way.popleft()
        group.on_result(result, now / 1e6)
        if step == steps // 2:
            half_at = now
        elif step > steps // 2:
            depth = max(depth, len(on_way))
    return (steps - 1 - steps // 2) * step_us / (now - half_at), depth


@pytest.mark.parametrize("step_us", [1_000, 2_500, 10_000])
@pytest.mark.parametrize("delay_us", [0, 1_000, 5_000])
def test_the_device_is_busy_at_any_distance(step_us: int, delay_us: int) -> None:
    busy, depth = simulate(step_us, delay_us, overlap=True)
    assert busy > 0.98
    assert depth <= 2 + (2 * delay_us + MAX_MARGIN_US) / step_us


def test_without_overlap_each_step_waits_for_the_result_before() -> None:
    busy, depth = simulate(2_500, 1_000, overlap=False)
    assert busy == pytest.approx(2_500 / 4_500, rel=0.01)
    assert depth == 1


def test_round_trip_is_a_low_percentile() -> None:
    lead = Lead(overlap=True)
    for index in range(1_000):
        lead.on_result(500_000 if index % 2 else 1_000 + index % 7, idle_us=0, followed=True)
    assert 1_000 <= lead.round_trip_us <= 1_010


def test_margin_grows_by_starvation_only() -> None:
    lead = Lead(overlap=True)
    before = lead.margin_us
    lead.on_result(1_000, idle_us=3_000_000, followed=False)  # there was no work
    assert lead.margin_us <= before
    for _ in range(10):
        lead.on_result(1_000, idle_us=3_000, followed=True)
    assert lead.margin_us == MAX_MARGIN_US
    for _ in range(3_000):
        lead.on_result(1_000, idle_us=0, followed=True)
    assert lead.margin_us < MAX_MARGIN_US / 10


def test_step_times_follow_the_size() -> None:
    times = StepTimes()
    assert times.estimate(1, 0) == UNKNOWN_STEP_US
    for _ in range(100):
        times.observe(1, 0, 2_000)
        times.observe(64, 500, 30_000)
    assert times.estimate(1, 0) == 2_000
    assert times.estimate(60, 400) == times.estimate(64, 500) == 30_000
    assert times.estimate(2, 0) == 2_000  # the nearest that was measured
