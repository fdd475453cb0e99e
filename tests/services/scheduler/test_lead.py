"""Distance must cost the device no idle time, and a deep queue must cost newcomers none."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from services.scheduler.group import Group
from services.scheduler.lead import (
    JUMP_SHARE,
    MAX_JUMP_CREDIT_US,
    MAX_MARGIN_US,
    MAX_MARGIN_WITH_JUMP_US,
    PLAN_US,
    UNKNOWN_STEP_US,
    Lead,
    StepTimes,
)
from services.scheduler.steps import StepResult
from shared.protocol.plan import MAX_BURST, Limits, Plan
from tests.services.scheduler.build import METRICS, make_request
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
            end_us=round(start + plan.iterations * step_us),
            idle_us=round(start - free_at),
            hold_us=round(start + plan.iterations * step_us - arrived),
        )
        free_at = start + plan.iterations * step_us
        on_way.append((free_at + delay_us, result))

    group = Group("group", LIMITS, 0, 64, overlap, send, lambda updated, at: None, METRICS.engine("group"))
    group.submit(make_request(1, [1, 2, 3], steps + 200, ignore_eos=True), 0.0)
    half_at, done, half_done, depth = 0.0, 0, 0, 0
    while done < steps:
        now, result = on_way.popleft()
        group.on_result(result, now / 1e6)
        done += len(result.ids)
        if not half_at and done >= steps // 2:
            half_at, half_done = now, done
        elif half_at:
            depth = max(depth, len(on_way))
    return (done - half_done) * step_us / (now - half_at), depth


@pytest.mark.parametrize("step_us", [1_000, 2_500, 10_000])
@pytest.mark.parametrize("delay_us", [0, 1_000, 5_000])
def test_the_device_is_busy_at_any_distance(step_us: int, delay_us: int) -> None:
    busy, depth = simulate(step_us, delay_us, overlap=True)
    assert busy > 0.98
    assert depth <= 2 + (2 * delay_us + MAX_MARGIN_WITH_JUMP_US) / max(step_us, PLAN_US)


def test_without_overlap_each_step_waits_for_the_result_before() -> None:
    busy, depth = simulate(2_500, 1_000, overlap=False)
    assert busy == pytest.approx(2_500 / 4_500, rel=0.01)
    assert depth == 1


def test_round_trip_is_a_low_percentile() -> None:
    lead = Lead(overlap=True)
    for index in range(1_000):
        lead.on_result(500_000 if index % 2 else 1_000 + index % 7, late_us=0)
    assert 1_000 <= lead.round_trip_us <= 1_010


@pytest.mark.parametrize("jump, most", [(False, MAX_MARGIN_US), (True, MAX_MARGIN_WITH_JUMP_US)])
def test_margin_grows_by_starvation_only(jump: bool, most: int) -> None:
    lead = Lead(overlap=True, jump=jump)
    for _ in range(10):
        lead.on_result(1_000, late_us=3_000)
    assert lead.margin_us == most
    for _ in range(3_000):
        lead.on_result(1_000, late_us=0)
    assert lead.margin_us < most / 10


def test_bursts_make_up_for_short_steps_and_for_many_groups() -> None:
    lead = Lead(overlap=True)
    assert [lead.burst(step_us) for step_us in (1, 500, 1_999, 2_000, 10_000)] == [MAX_BURST, 4, 2, 1, 1]
    lead.share(8)
    assert lead.burst(2_600) == 4
    assert Lead(overlap=True, bursts=False).burst(1) == 1


def test_a_jump_needs_a_queue_and_none_of_its_own() -> None:
    lead = Lead(overlap=True)
    assert [lead.may_jump(outstanding, 0) for outstanding in range(4)] == [False, False, True, True]
    assert not lead.may_jump(3, jumping_us=1_000)
    assert not Lead(overlap=True, jump=False).may_jump(3, 0)
    assert not Lead(overlap=False).may_jump(3, 0)


def test_jumps_have_a_small_share_of_the_devices_time() -> None:
    lead = Lead(overlap=True)
    lead.on_jump(MAX_JUMP_CREDIT_US)
    assert not lead.may_jump(3, 0)
    lead.on_jump(10_000)
    lead.on_computed(round(9_000 / JUMP_SHARE))
    assert not lead.may_jump(3, 0)
    lead.on_computed(round(2_000 / JUMP_SHARE))
    assert lead.may_jump(3, 0)
    lead.on_computed(1 << 40)
    lead.on_jump(MAX_JUMP_CREDIT_US)  # no more is saved up
    assert not lead.may_jump(3, 0)


def test_a_plan_is_late_only_when_the_device_waited_for_it() -> None:
    result = StepResult(0, np.zeros((1, 1), np.int32), np.zeros(1, np.int32), hold_us=1_000, start_us=5_000, end_us=6_000, idle_us=400)
    assert result.late_us == 400  # it came when the device was idle
    assert replace(result, hold_us=1_300).late_us == 100
    assert replace(result, hold_us=9_000).late_us == 0  # it had come long before: the device idles by itself


def test_idle_time_without_work_is_nobodys_fault() -> None:
    sent: list[Plan] = []
    group = Group("group", LIMITS, 0, 64, True, sent.append, lambda updated, at: None, METRICS.engine("group"))
    device = Device(LIMITS, model=lambda ids, vocab_size: 7)
    before = group.lead.margin_us
    for number in range(5):
        group.submit(make_request(number, [1], 1), float(number))
        group.on_result(replace(device.run(sent.pop()), idle_us=1_000_000), float(number))
    assert group.lead.margin_us <= before


def test_step_times_follow_the_size() -> None:
    times = StepTimes()
    assert times.estimate(1, 0) == UNKNOWN_STEP_US
    for _ in range(100):
        times.observe(1, 0, 2_000)
        times.observe(64, 500, 30_000)
    assert times.estimate(1, 0) == 2_000
    assert times.estimate(60, 400) == times.estimate(64, 500) == 30_000
    assert times.estimate(2, 0) == 2_000  # the nearest that was measured
