"""What comes in, where it goes, when it is given up; groups compute nothing here unless asked to."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.scheduler.deadlines import SLACK
from services.scheduler.early_cancels import MAX_CANCELS
from services.scheduler.ends import (
    CANCELLED,
    FAILED,
    LOST,
    LOST_TOO_OFTEN,
    MAX_UNPLANNED_MOVES,
    OUT_OF_TIME,
    SUPERSEDED,
    TOO_LONG,
    UNAVAILABLE,
    End,
    Finished,
    Rejected,
)
from services.scheduler.group import Group
from services.scheduler.health import FIRST_S, MAX_FAILURES, Health
from services.scheduler.model import Model
from services.scheduler.requests import Key, Request
from services.scheduler.scheduler import Scheduler
from shared.protocol import generation_pb2 as pb
from shared.protocol.plan import Limits, Plan
from tests.services.scheduler import session_client
from tests.services.scheduler.build import METRICS
from tests.services.scheduler.device import EOS, FAIL, Device

LIMITS = Limits(slots=1, pages=41, page_size=4, max_length=64, max_step_tokens=16, vocab_size=50)
MODEL = Model("abc", vocab_size=50, max_length=64, eos_ids=frozenset({EOS}), files=())
SESSION = 1


class Harness:
    def __init__(self, groups: int = 1, **limits: Any) -> None:
        self.now = 0.0
        self.ends: dict[tuple[int, int], End] = {}  # by (request, attempt)
        limits = {"max_waiting_requests": 100, "max_waiting_tokens": 1_000, "group_wait_s": 10.0} | limits
        self.scheduler = Scheduler(deliver=self.deliver, metrics=METRICS, now=0.0, **limits)
        self.scheduler.model = MODEL
        self.plans: dict[Group, list[Plan]] = {}
        self.devices: dict[Group, Device] = {}
        self.outputs: dict[int, list[int]] = {}  # by request
        self.sick: set[Group] = set()  # whose every row fails
        self.groups = [self.add_group() for _ in range(groups)]

    def add_group(self, limits: Limits = LIMITS, **options: Any) -> Group:
        plans: list[Plan] = []
        group = Group("group", limits, 0, 16, True, plans.append, self.scheduler.deliver, METRICS.engine("group"), **options)
        self.plans[group] = plans
        self.scheduler.add_group(group, self.now)
        return group

    def deliver(self, updated: list[Request], now: float) -> None:
        for request in updated:
            self.outputs[request.key.request] = list(request.output)
            if request.end is not None:
                name = (request.key.request, request.attempt)
                assert name not in self.ends, "ended twice"
                self.ends[name] = request.end

    def submit(self, request: int, max_tokens: int = 20, *, prompt: tuple[int, ...] = (1, 2), **fields: Any) -> Rejected | None:
        return self.scheduler.submit(session_client.submit(request, list(prompt), max_tokens, **fields), SESSION, self.now)

    def cancel(self, request: int, attempt: int = 1) -> None:
        self.scheduler.cancel(Key(SESSION, request), attempt, self.now)

    def tick(self, now: float) -> None:
        self.now = now
        self.scheduler.tick(now)

    def lose(self, group: Group, *, overdue: bool = False) -> None:
        self.scheduler.remove_group(group, self.now, overdue=overdue)

    def compute(self, group: Group, results: int) -> None:
        device = self.devices.setdefault(group, Device(group.limits, model=lambda ids, vocab_size: FAIL if group in self.sick else 7))
        for _ in range(results):
            self.scheduler.on_result(group, device.run(self.plans[group].pop(0)), self.now)

    def finish(self, group: Group) -> None:
        while self.plans[group]:
            self.compute(group, 1)


def test_the_group_with_fewest_requests_is_chosen() -> None:
    harness = Harness(groups=2)
    for number in range(6):
        assert harness.submit(number) is None
    assert [group.load for group in harness.groups] == [3, 3]


def test_clients_are_told_of_an_end_before_it_is_entered_in_the_books() -> None:
    postponed: list[Callable[[], None]] = []
    harness = Harness(later=postponed.append)
    harness.submit(1, max_tokens=1)
    harness.finish(harness.groups[0])
    assert (1, 1) in harness.ends
    assert harness.scheduler.requests_page(0.0)["ended"] == harness.scheduler.requests_page(0.0)["live"] == []
    for work in postponed:
        work()
    assert [each["completion_tokens"] for each in harness.scheduler.requests_page(0.0)["ended"]] == [1]  # type: ignore[attr-defined]


def test_a_request_goes_where_it_fits() -> None:
    harness = Harness()
    larger = harness.add_group(replace(LIMITS, max_length=200))
    harness.scheduler.model = replace(MODEL, max_length=200)
    for number in range(3):
        assert harness.submit(number, max_tokens=150) is None
    assert larger.load == 3


def test_what_fits_no_group_is_rejected_at_once() -> None:
    harness = Harness(groups=0)
    harness.add_group(replace(LIMITS, pages=4))  # 12 tokens, and one more that is never written
    assert harness.submit(1, max_tokens=12) == TOO_LONG
    assert harness.submit(2, max_tokens=11) is None


def test_a_higher_attempt_retires_the_lower_and_a_lower_one_is_ignored() -> None:
    harness = Harness()
    harness.submit(1, attempt=2)
    assert harness.submit(1, attempt=1) is None
    assert harness.submit(1, attempt=2) is None
    assert not harness.ends
    harness.submit(1, attempt=3)
    assert harness.ends == {(1, 2): SUPERSEDED}
    harness.cancel(1, attempt=2)  # late, of the one before
    assert harness.scheduler.num_requests == 1
    harness.cancel(1, attempt=3)
    assert harness.ends[1, 3] == CANCELLED
    assert harness.scheduler.num_requests == 0


def test_cancels_of_unknown_requests_are_kept_within_bounds() -> None:
    harness = Harness()
    for number in range(MAX_CANCELS + 5):
        harness.cancel(number)
    harness.submit(0)  # its cancel is the oldest, and gone
    harness.submit(MAX_CANCELS)
    assert harness.ends == {(MAX_CANCELS, 1): CANCELLED}


def test_a_dropped_session_takes_its_requests_along() -> None:
    harness = Harness()
    for number in range(3):
        harness.submit(number)
    harness.scheduler.drop_session(SESSION + 1, 0.0)
    assert not harness.ends
    harness.scheduler.drop_session(SESSION, 0.0)
    assert list(harness.ends.values()) == [CANCELLED] * 3
    assert harness.groups[0].load == 0


def test_before_the_first_group_nothing_can_be_taken() -> None:
    harness = Harness(groups=0)
    harness.scheduler.model = None
    assert harness.submit(1) == UNAVAILABLE


def test_requests_are_held_for_a_group() -> None:
    harness = Harness(groups=0)
    harness.submit(1)
    harness.tick(9.9)
    harness.submit(2)
    harness.tick(10.1)
    assert harness.ends == {(1, 1): UNAVAILABLE}
    group = harness.add_group()
    assert group.load == 1
    harness.tick(100.0)
    assert harness.ends == {(1, 1): UNAVAILABLE}


def test_held_requests_can_be_cancelled_and_superseded() -> None:
    harness = Harness(groups=0)
    harness.submit(1)
    harness.submit(1, attempt=2)
    harness.cancel(1, attempt=2)
    assert harness.ends == {(1, 1): SUPERSEDED, (1, 2): CANCELLED}
    assert harness.add_group().load == 0


def test_a_held_request_that_fits_no_group_after_all_is_rejected() -> None:
    harness = Harness(groups=0)
    harness.submit(1, max_tokens=50)
    harness.add_group(replace(LIMITS, pages=4))
    assert harness.ends == {(1, 1): TOO_LONG}


def test_requests_of_a_lost_group_go_on_in_another_with_what_they_have() -> None:
    harness = Harness(groups=2)
    for number in range(4):
        harness.submit(number, max_tokens=9)
    one, other = harness.groups
    harness.compute(one, 2)
    assert harness.outputs[0]
    harness.lose(one)
    assert not harness.ends
    assert other.load == 4
    harness.finish(other)
    assert harness.ends == {(number, 1): Finished(pb.FINISH_REASON_LENGTH) for number in range(4)}
    assert harness.outputs[0] == [7] * 9
    assert harness.scheduler.num_requests == 0


def test_who_had_begun_at_a_lost_group_goes_before_those_who_wait_and_keeps_its_rank() -> None:
    harness = Harness(groups=2)
    for number in range(8):
        harness.now = float(number)
        harness.submit(number, max_tokens=3)
    one, other = harness.groups
    begun = [request.key.request for request in one.running()]
    harness.lose(one)
    order: list[int] = []
    while other.load:
        order += [request.key.request for request in other.running() if request.key.request not in order]
        harness.compute(other, 1)
    running, *rest = order
    assert rest == begun + sorted(set(range(8)) - {running, *begun})


def test_requests_wait_for_the_return_of_the_only_group() -> None:
    harness = Harness()
    harness.submit(1, max_tokens=9)
    harness.submit(2, max_tokens=9)
    harness.compute(harness.groups[0], 2)
    harness.lose(harness.groups[0])
    harness.tick(9.9)
    assert not harness.ends
    harness.finish(harness.add_group())
    assert harness.ends == {(number, 1): Finished(pb.FINISH_REASON_LENGTH) for number in (1, 2)}
    assert harness.outputs == {1: [7] * 9, 2: [7] * 9}


def test_who_waits_too_long_for_a_lost_group_gets_an_error_that_is_worth_a_retry() -> None:
    harness = Harness()
    harness.submit(1)
    harness.submit(2)
    harness.compute(harness.groups[0], 1)
    harness.lose(harness.groups[0])
    harness.tick(10.1)
    assert harness.ends == {(1, 1): LOST, (2, 1): UNAVAILABLE}
    assert harness.scheduler.num_requests == 0


def test_a_smaller_group_does_not_end_who_waits_for_the_return_of_a_larger() -> None:
    harness = Harness()
    for number in (1, 2):
        harness.submit(number, max_tokens=50)
    harness.lose(harness.groups[0])
    harness.now = 6.0
    small = harness.add_group(replace(LIMITS, pages=4))
    assert not small.load
    assert harness.ends == {(2, 1): TOO_LONG}  # it had not begun
    harness.tick(10.1)  # since the loss, not since the smaller one came
    assert harness.ends[1, 1] == LOST


def test_a_request_that_takes_along_every_group_ends() -> None:
    harness = Harness()
    harness.submit(1)
    for _ in range(MAX_UNPLANNED_MOVES):
        harness.lose(harness.scheduler.groups[0])
        assert not harness.ends
        harness.add_group()
    harness.submit(2)  # waits behind it
    harness.lose(harness.scheduler.groups[0])
    assert harness.ends == {(1, 1): LOST_TOO_OFTEN}
    harness.finish(harness.add_group())
    assert harness.ends[2, 1] == Finished(pb.FINISH_REASON_LENGTH)


def test_what_it_took_along_at_other_schedulers_counts() -> None:
    harness = Harness()
    harness.submit(1, attempt=2, unplanned_moves=MAX_UNPLANNED_MOVES)
    harness.lose(harness.scheduler.groups[0])
    assert harness.ends == {(1, 2): LOST_TOO_OFTEN}


def test_drained_groups_do_not_count_as_lost() -> None:
    harness = Harness()
    harness.submit(1)
    for _ in range(2 * MAX_UNPLANNED_MOVES):
        group = harness.scheduler.groups[0]
        harness.scheduler.drain_group(group, harness.now)
        harness.lose(group)
        harness.add_group()
    assert not harness.ends


def lost_with_an_end_untold() -> tuple[Harness, Group]:
    """Request 1 had ended in the group, which was lost before anybody was told."""
    harness = Harness()
    harness.submit(1, max_tokens=1)
    group = harness.groups[0]
    (request,) = group.running()
    assert request.slot is not None
    group.occupancy.retire(request.slot, Finished(pb.FINISH_REASON_LENGTH), release=False)  # and then something broke
    harness.lose(group)
    return harness, group


def test_an_end_that_nobody_was_told_of_is_not_lost_with_the_group() -> None:
    harness, _ = lost_with_an_end_untold()
    assert harness.ends == {(1, 1): Finished(pb.FINISH_REASON_LENGTH)}


def test_running_requests_of_a_draining_group_move_where_there_is_room() -> None:
    harness = Harness(groups=0)
    draining = harness.add_group(replace(LIMITS, slots=3))
    for number in range(3):
        harness.submit(number, max_tokens=40)
    harness.compute(draining, 3)
    assert draining.num_running == 3
    free = harness.add_group(replace(LIMITS, slots=2))
    harness.scheduler.drain_group(draining, harness.now)
    harness.finish(draining)  # what was on its way counts; the one for which there is no room ends in place
    assert free.load == 2
    assert len(harness.ends) == 1
    harness.finish(free)
    assert set(harness.ends.values()) == {Finished(pb.FINISH_REASON_LENGTH)}
    assert harness.outputs == {number: [7] * 40 for number in range(3)}


def test_room_that_comes_later_is_used_by_a_draining_group() -> None:
    harness = Harness()
    harness.submit(1, max_tokens=30)
    draining = harness.groups[0]
    harness.scheduler.drain_group(draining, harness.now)
    harness.compute(draining, 2)
    other = harness.add_group()
    harness.tick(1.0)
    harness.finish(draining)
    assert (draining.load, other.load) == (0, 1)
    harness.finish(other)
    assert harness.outputs[1] == [7] * 30


def test_who_leaves_a_draining_group_for_one_that_is_lost_meanwhile_ends_in_place() -> None:
    harness = Harness()
    harness.submit(1, max_tokens=30)
    draining = harness.groups[0]
    harness.compute(draining, 1)
    other = harness.add_group()
    harness.scheduler.drain_group(draining, harness.now)
    assert all(request.leaving for request in draining.running())
    harness.lose(other)
    harness.finish(draining)
    assert harness.ends == {(1, 1): Finished(pb.FINISH_REASON_LENGTH)}
    assert harness.outputs[1] == [7] * 30


def test_a_paused_scheduler_sends_no_plans_and_takes_what_comes() -> None:
    harness = Harness()
    harness.submit(1, max_tokens=9)
    group = harness.groups[0]
    harness.scheduler.pause()
    harness.submit(2)
    sent = len(harness.plans[group])
    assert sent
    assert not harness.scheduler.settled
    harness.finish(group)
    assert harness.scheduler.settled
    assert len(harness.outputs[1]) == sent
    assert not harness.ends


def test_a_draining_group_hands_on_what_waits() -> None:
    harness = Harness(groups=2)
    for number in range(6):
        harness.submit(number)
    harness.scheduler.drain_group(harness.groups[0], 0.0)
    harness.submit(6)
    assert [group.load for group in harness.groups] == [1, 6]
    harness.cancel(2)
    assert harness.ends == {(2, 1): CANCELLED}


def test_too_many_requests() -> None:
    harness = Harness(max_waiting_requests=2)
    assert [harness.submit(number) for number in range(3)] == [None] * 3  # one runs, two wait
    rejected = harness.submit(3)
    assert rejected is not None
    assert (rejected.reason, rejected.retry_after_ms) == (pb.REJECT_REASON_OVERLOADED, 1_000)
    assert harness.submit(3, delivered=(5,)) is None  # in the middle of a stream
    assert harness.submit(4, attempt=2) is None  # another scheduler had taken it


def test_requests_that_are_submitted_again_go_first_in_the_order_of_their_first_arrival() -> None:
    harness = Harness()
    harness.now = 100.0
    for number, (attempt, age_ms) in enumerate([(1, 0), (1, 0), (2, 1_000), (2, 5_000)], start=1):
        harness.submit(number, max_tokens=1, attempt=attempt, age_ms=age_ms)
    harness.finish(harness.groups[0])
    assert [request for request, _ in harness.ends] == [1, 4, 3, 2]


def test_too_many_tokens_but_never_for_one_alone() -> None:
    harness = Harness(max_waiting_tokens=10)
    assert harness.submit(1) is None
    assert harness.submit(2, prompt=(1,) * 40) is None
    rejected = harness.submit(3)
    assert rejected is not None
    assert rejected.reason == pb.REJECT_REASON_OVERLOADED


def test_retry_after_is_the_backlog_by_the_rate() -> None:
    harness = Harness(max_waiting_requests=40)
    for second in range(60):  # two requests end each second
        harness.now = float(second)
        for number in (2 * second, 2 * second + 1):
            harness.submit(number)
            harness.cancel(number)
    for number in range(200, 241):
        harness.submit(number)
    rejected = harness.submit(300)
    assert rejected is not None
    assert rejected.retry_after_ms == pytest.approx(20_000, rel=0.1)


def test_deadlines() -> None:
    harness = Harness()
    harness.submit(1, deadline_ms=1_000)
    harness.submit(2, deadline_ms=2_000)
    harness.submit(3, deadline_ms=3_000, delivered=(4,))
    harness.submit(4, deadline_ms=500)
    harness.cancel(4)
    harness.submit(4, attempt=2)  # without a deadline
    harness.tick(0.9)
    assert set(harness.ends) == {(4, 1)}
    harness.tick(5.0)
    assert harness.ends == {(4, 1): CANCELLED, (1, 1): OUT_OF_TIME, (2, 1): OUT_OF_TIME, (3, 1): OUT_OF_TIME}


def test_a_resumed_request_that_was_delivered_whole_only_ends() -> None:
    harness = Harness()
    harness.submit(1, max_tokens=2, delivered=(5, 6))
    harness.submit(2, max_tokens=9, delivered=(5, EOS))
    assert harness.ends == {(1, 1): Finished(pb.FINISH_REASON_LENGTH), (2, 1): Finished(pb.FINISH_REASON_STOP)}
    assert harness.groups[0].load == 0


def test_a_finished_request_is_forgotten() -> None:
    harness = Harness()
    harness.submit(1, max_tokens=1)
    harness.compute(harness.groups[0], 1)
    assert harness.ends == {(1, 1): Finished(pb.FINISH_REASON_LENGTH)}
    assert harness.scheduler.num_requests == 0
    harness.cancel(1)  # crossed on the way
    harness.submit(1, max_tokens=1, attempt=2)
    assert harness.scheduler.num_requests == 1


def test_who_could_not_start_in_time_is_refused_at_once() -> None:
    harness = Harness()
    for number in range(40):
        assert harness.submit(number, max_tokens=1, deadline_ms=100_000) is None  # nothing is known yet
    device = Device(LIMITS, model=lambda ids, vocab_size: 7)
    while len(harness.ends) < 20:  # one in half a second
        harness.now += 0.5
        harness.groups[0].on_result(device.run(harness.plans[harness.groups[0]].pop(0)), harness.now)
    assert harness.submit(41, deadline_ms=60_000) is None
    rejected = harness.submit(42, deadline_ms=2_000)
    assert rejected is not None
    assert rejected.reason == pb.REJECT_REASON_DEADLINE
    assert 5_000 < rejected.retry_after_ms < 20_000  # 20 are left
    assert harness.submit(43, deadline_ms=2_000, delivered=(5,)) is None  # a resumed request is never refused for load


def test_what_small_prompts_take_tells_nothing_of_a_long_queue() -> None:
    harness = Harness()
    for number in range(5):
        harness.submit(number, max_tokens=1)
        harness.finish(harness.groups[0])  # 2 tokens in 120 us, where 16 take 260
    for number in range(5, 15):
        assert harness.submit(number, max_tokens=1, prompt=(number,) * 60) is None
    assert harness.submit(20, deadline_ms=20) is None
    harness.compute(harness.groups[0], 3)
    rejected = harness.submit(21, deadline_ms=5)  # 550 tokens before it take 9 ms
    assert rejected is not None
    assert rejected.reason == pb.REJECT_REASON_DEADLINE


def test_that_none_has_ended_lately_is_no_reason_to_refuse_one() -> None:
    harness = Harness()
    for number in range(20):
        assert harness.submit(number, max_tokens=1) is None
    while harness.groups[0].load:
        harness.now += 0.5
        harness.compute(harness.groups[0], 1)
    assert harness.submit(20, max_tokens=60) is None  # it has the only slot
    harness.now += 300.0
    assert harness.submit(21, deadline_ms=60_000) is None


def test_deadlines_of_requests_that_have_ended_do_not_pile_up() -> None:
    harness = Harness()
    for number in range(1_000):
        harness.submit(number, deadline_ms=3_600_000)
        harness.cancel(number)
    assert len(harness.scheduler._deadlines) <= 2 * SLACK


def test_a_timer_of_a_lost_group_tells_no_end_twice() -> None:
    harness, group = lost_with_an_end_untold()
    harness.submit(1, max_tokens=1, attempt=2)
    group.on_time(0.0)
    assert set(harness.ends) == {(1, 1)}
    assert harness.scheduler.num_requests == 1


def test_a_request_whose_row_fails_goes_on_in_another_group_with_what_it_has() -> None:
    harness = Harness(groups=2)
    harness.submit(1, max_tokens=40)
    one, other = sorted(harness.groups, key=lambda group: -group.load)
    harness.compute(one, 2)
    harness.sick.add(one)
    harness.finish(one)
    assert (one.load, other.load) == (0, 1)
    assert one.health.is_well  # it may have been the request
    assert harness.outputs[1]
    harness.finish(other)
    assert harness.ends == {(1, 1): Finished(pb.FINISH_REASON_LENGTH)}
    assert harness.outputs[1] == [7] * 40


def test_a_request_that_fails_everywhere_ends_and_so_does_every_one_of_the_only_group() -> None:
    for groups in (1, 2, 6):
        harness = Harness(groups=groups)
        harness.sick.update(harness.groups)
        harness.submit(1)
        while harness.scheduler.num_requests:
            for group in harness.groups:
                if harness.plans[group]:
                    harness.compute(group, 1)
        assert harness.ends == {(1, 1): FAILED}
        assert len(harness.devices) == min(groups, 1 + MAX_UNPLANNED_MOVES)  # that have computed anything


def sicken(harness: Harness) -> tuple[Group, Group]:
    """Of two groups one is ejected; returns it and the other."""
    sick, well = harness.groups
    harness.sick.add(sick)
    number = 100
    while sick.health.is_well:
        number += 1
        harness.submit(number, max_tokens=2)
        harness.compute(sick, len(harness.plans[sick]))
        harness.finish(well)
    return sick, well


def test_a_group_that_fails_every_row_is_ejected_and_what_waits_there_moves_and_does_not_count() -> None:
    harness = Harness(groups=2)
    harness.groups[0].health.failures = MAX_FAILURES - 1
    sick, well = harness.groups
    harness.sick.add(sick)
    for number in range(8):
        harness.submit(number, max_tokens=2)
    assert sick.load == 4
    (begun,) = sick.running()
    harness.compute(sick, 1)
    assert not sick.health.is_well
    assert not sick.state().ready
    assert len(sick.waiting) == 0
    harness.finish(sick)  # who was admitted just then
    assert (sick.load, well.load) == (0, 8)
    requests = [*well.running(), *well.waiting]
    assert [request for request in requests if request.unplanned_moves] == [begun]
    harness.finish(well)
    assert set(harness.ends.values()) == {Finished(pb.FINISH_REASON_LENGTH)}
    assert len(harness.ends) == 8


def test_an_ejected_group_is_tried_by_one_request_after_a_while_each_time_later() -> None:
    harness = Harness(groups=2)
    sick, well = sicken(harness)
    for trial in range(1, 4):
        for number in range(20):
            harness.submit(1_000 * trial + number)
        assert sick.load < 1  # not yet
        harness.now += FIRST_S * 2 ** (trial - 1)
        harness.submit(1_000 * trial + 20, attempt=2)  # in the middle of a stream
        assert sick.load < 1
        for number in range(21, 24):
            harness.submit(1_000 * trial + number)
            assert sick.load == 1
        harness.finish(sick)
        assert not sick.load
        assert sick.health.ejections == trial + 1
        harness.finish(well)
    assert set(harness.ends.values()) == {Finished(pb.FINISH_REASON_LENGTH)}
    harness.sick.clear()
    harness.now += FIRST_S * 8
    harness.submit(10_000)
    harness.compute(sick, 1)
    assert sick.health.is_well
    assert sick.state().ready


def test_without_another_group_an_ejected_one_goes_on() -> None:
    harness = Harness(groups=2)
    sick, well = sicken(harness)
    harness.lose(well)
    harness.submit(1, max_tokens=3)
    assert sick.load == 1
    harness.sick.clear()
    harness.finish(sick)
    assert harness.ends[1, 1] == Finished(pb.FINISH_REASON_LENGTH)
    assert sick.health.is_well


def test_a_group_that_was_given_up_gets_one_request_at_a_time_when_it_is_back() -> None:
    harness = Harness(groups=1)
    health = Health()
    hanging = harness.add_group(health=health)
    harness.submit(1)
    harness.submit(2)
    assert hanging.load == 1
    harness.lose(hanging, overdue=True)
    back = harness.add_group(health=health)
    for number in range(3, 10):
        harness.submit(number)
    assert back.load < 1
    harness.now += FIRST_S
    for number in range(10, 13):
        harness.submit(number)
        assert back.load == 1
    harness.compute(back, 1)
    for number in range(30, 50):
        harness.submit(number)
    assert back.load > 10


def test_a_part_of_a_prompt_makes_no_group_well() -> None:
    """One that hangs where tokens are sampled computes all chunks but the last."""
    harness = Harness(groups=1)
    health = Health()
    hanging = harness.add_group(health=health)
    harness.submit(1)
    harness.submit(2)
    harness.lose(hanging, overdue=True)
    back = harness.add_group(health=health)
    harness.now += FIRST_S
    harness.submit(3, prompt=tuple(range(10, 40)))  # in two chunks
    assert back.load == 1
    harness.compute(back, 1)
    assert not health.is_well
    for number in range(4, 10):
        harness.submit(number)
        assert back.load == 1
    harness.compute(back, 1)
    assert health.is_well


def test_a_group_whose_stream_breaks_again_and_again_before_it_has_computed_anything_is_ejected() -> None:
    harness = Harness(groups=1)
    health = Health()
    for losses in range(1, MAX_FAILURES + 1):
        breaking = harness.add_group(health=health)
        number = 100 * losses
        while not breaking.load:
            number += 1
            harness.submit(number)
        harness.lose(breaking)
        assert health.is_well == (losses < MAX_FAILURES)
    idle = harness.add_group(health=Health())
    for _ in range(MAX_FAILURES):
        harness.lose(idle)  # which tells nothing of it
        idle = harness.add_group(health=idle.health)
    assert idle.health.is_well
