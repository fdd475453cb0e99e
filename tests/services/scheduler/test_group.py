"""What a group does in single cases; that nothing is lost whatever the order, `test_group_machine.py` shows."""

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.scheduler.ends import FAILED, STOPPED_EARLY, Finished
from services.scheduler.group import Group
from services.scheduler.pages import PageState
from services.scheduler.requests import Request, Sampling
from services.scheduler.steps import StepResult
from shared.errors import ProtocolError
from shared.protocol.generation_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_LENGTH
from shared.protocol.plan import FAILED_ROW, MAX_PLAN_BYTES, NO_STOP_ID, NO_TOKEN, Limits, Plan, SlotFlag, encode
from tests.services.scheduler.build import METRICS, make_request
from tests.services.scheduler.device import Device

LIMITS = Limits(slots=3, pages=41, page_size=4, max_length=64, max_step_tokens=16, vocab_size=50)
CANCELLED = Finished(FINISH_REASON_CANCELLED)


class Harness:
    """A group, and a device whose results come back when the test says so."""

    def __init__(self, limits: Limits = LIMITS, max_step_tokens: int = 16, overlap: bool = True, **options: Any) -> None:
        self.plans: list[Plan] = []  # all that were sent
        self.results: deque[StepResult] = deque()
        self.ended: list[Request] = []
        self.device = Device(limits, model=lambda ids, vocab_size: 7)
        options = {"bursts": False, "jump": False} | options
        self.group = Group("group", limits, 0, max_step_tokens, overlap, self.send, self.deliver, METRICS.engine("group"), **options)

    def send(self, plan: Plan) -> None:
        self.plans.append(plan)
        self.results.append(self.device.run(plan))

    def deliver(self, updated: list[Request], now: float) -> None:
        self.ended.extend(request for request in updated if request.end is not None)

    def submit(self, *args: object, **fields: object) -> Request:
        request = make_request(*args, **fields)  # type: ignore[arg-type]
        self.group.submit(request, 0.0)
        return request

    def step(self, **changes: object) -> None:
        """The oldest result comes in, changed."""
        self.group.on_result(replace(self.results.popleft(), **changes), 0.0)  # type: ignore[arg-type]

    def finish(self) -> None:
        while self.results:
            self.step()


def test_tokens_do_not_wait_until_a_slot_is_free_that_nobody_wants_yet() -> None:
    wakes: list[float] = []
    harness = Harness(wake=wakes.append)
    harness.submit(1, [1, 2, 3], 1)
    harness.step()
    assert len(harness.ended) == 1
    assert (wakes, harness.group.slots.num_free) == ([0.0], LIMITS.slots - 1)
    harness.submit(2, [4, 5], 1)  # who comes before that frees it, too
    assert harness.group.slots.num_free == LIMITS.slots - 1
    harness.finish()
    harness.group.on_time(0.0)
    assert harness.group.slots.num_free == LIMITS.slots


def test_plans_go_ahead_of_results_but_never_past_the_end() -> None:
    harness = Harness()
    request = harness.submit(1, [1, 2, 3], 3)
    assert len(harness.plans) == 2  # the prefill, which brings a token, and a decode row
    harness.finish()
    assert len(harness.plans) == 3
    assert request.end == Finished(FINISH_REASON_LENGTH)


def test_without_overlap_one_plan_is_on_its_way() -> None:
    harness = Harness(overlap=False)
    harness.submit(1, [1, 2, 3], 5)
    while harness.results:
        assert len(harness.results) == 1
        harness.step()
    assert len(harness.plans) == 5


def test_an_admission_carries_all_that_the_device_must_know() -> None:
    harness = Harness()
    request = make_request(1, [1, 2, 3], 9, min_tokens=2, ignore_eos=True, stop_ids=(4, 5))
    request.sampling = Sampling(temperature=0.5, top_k=40, top_p=0.25, min_p=0.125, seed=-3)
    harness.group.submit(request, 0.0)
    (record,) = harness.plans[0].admissions
    assert (record["epoch"], record["flags"], record["min_length"], record["max_length"]) == (1, SlotFlag.IGNORE_EOS, 5, 12)
    assert (record["temperature"], record["top_k"], record["top_p"], record["min_p"]) == (0.5, 40, 0.25, 0.125)
    assert np.array([record["seed_low"], record["seed_high"]], dtype=np.uint32).view(np.int64)[0] == -3
    assert record["stop_ids"][:3].tolist() == [4, 5, NO_STOP_ID]


@pytest.mark.parametrize("prompt", [15, 16, 17, 40])
def test_a_step_keeps_to_its_budget(prompt: int) -> None:
    harness = Harness()
    harness.submit(1, [1] * prompt, 5)
    harness.submit(2, [2] * prompt, 5)
    harness.finish()
    chunks = [length for plan in harness.plans for length in plan.prefill_lengths.tolist()]
    assert sum(chunks) == 2 * prompt
    assert all(len(plan.decode_slots) + len(plan.prefill_ids) <= 16 for plan in harness.plans)
    assert [len(request.output) for request in harness.ended] == [5, 5]


def test_prompts_do_not_stall_a_running_stream() -> None:
    harness = Harness()
    stream = harness.submit(1, [1], 60, ignore_eos=True)
    harness.step()
    for number in range(2, 12):
        harness.submit(number, [1] * 60, 1)
    while len(stream.output) < 60:
        before = len(stream.output)
        harness.step()
        if stream.end is None:
            harness.step()
        assert len(stream.output) > before


def test_running_streams_do_not_stall_a_prompt_and_take_turns() -> None:
    harness = Harness(replace(LIMITS, slots=8, pages=200), max_step_tokens=4)
    streams = [harness.submit(number, [1], 60) for number in range(7)]
    while not all(stream.output for stream in streams):
        harness.step()
    newcomer = harness.submit(100, [1, 2, 3, 4, 5], 9)
    before = [len(stream.output) for stream in streams]
    for _ in range(20):
        harness.step()
    assert newcomer.output
    gained = [len(stream.output) - had for stream, had in zip(streams, before, strict=True)]
    assert min(gained) > 0
    assert max(gained) - min(gained) <= 2


def test_admission_takes_pages_for_the_prompt_and_one_more() -> None:
    harness = Harness(replace(LIMITS, pages=6))
    first, second = harness.submit(1, [1] * 4, 17), harness.submit(2, [2] * 4, 17)  # 5 pages each in the end, and 5 are there
    harness.step()
    assert first.slot is not None
    assert second.slot is not None
    third = harness.submit(3, [3] * 4, 17)
    assert third.slot is None
    harness.finish()
    assert [len(request.output) for request in (first, second, third)] == [17] * 3
    assert first.preemptions == 0  # the oldest never gives way
    assert second.preemptions + third.preemptions >= 1


def test_requests_of_one_long_cached_prefix_that_come_together_fit_into_plans() -> None:
    """Each admission names all the pages that it need not compute: those of 100 are more than a plan may carry."""
    limits = replace(LIMITS, slots=100, pages=2_000, max_length=5_000, max_step_tokens=1_024)
    harness = Harness(limits, max_step_tokens=1_024)
    prefix = [token % limits.vocab_size for token in range(4_096)]
    harness.submit(1, prefix, 1)
    harness.finish()
    assert 100 * len(prefix) // limits.page_size * 12 > MAX_PLAN_BYTES
    requests = [make_request(number, [*prefix, 3], 2) for number in range(2, 102)]
    for request in requests:
        harness.group.submit(request, 0.0, followed=True)
    harness.group.on_time(0.0)
    harness.finish()
    assert all(len(encode(plan)) <= MAX_PLAN_BYTES for plan in harness.plans)
    assert {request.end for request in requests} == {Finished(FINISH_REASON_LENGTH)}
    assert {request.cached_tokens for request in requests} == {len(prefix)}


def test_cancel_tells_the_device_and_frees_all_once_the_plans_have_passed() -> None:
    harness = Harness()
    request = harness.submit(1, [1, 2, 3], 40)
    other = harness.submit(2, [1], 10)
    slot = request.slot
    harness.step()
    sent = len(harness.plans)
    harness.group.end(request, CANCELLED, 0.0)
    assert harness.ended == [request]
    assert harness.group.memory.pool.count(PageState.OWNED) >= 1
    while len(harness.plans) == sent:
        harness.step()
    assert harness.plans[sent].release_slots.tolist() == [slot]
    harness.finish()
    assert len(other.output) == 10
    assert all(slot not in plan.row_slots for plan in harness.plans[sent:])
    assert harness.group.memory.free == LIMITS.pages - 1


def test_no_release_for_a_slot_that_is_free_already() -> None:
    harness = Harness(overlap=False)
    request = harness.submit(1, [1, 2, 3], 40)
    harness.group.end(request, CANCELLED, 0.0)
    harness.step()
    harness.submit(2, [1], 3)
    assert not len(harness.plans[-1].release_slots)
    harness.finish()
    assert [len(request.output) for request in harness.ended] == [0, 3]


def test_a_cancelled_prefill_gets_no_further_chunks() -> None:
    harness = Harness(overlap=False)
    request = harness.submit(1, [1] * 60, 3)
    harness.group.end(request, CANCELLED, 0.0)
    harness.finish()
    assert len(harness.plans) == 1
    assert harness.group.slots.num_free == LIMITS.slots


def test_results_of_another_use_of_the_slot_are_dropped() -> None:
    harness = Harness()
    request = harness.submit(1, [1, 2, 3], 9)
    harness.step(slot_epochs=np.array([99], dtype=np.int32))
    assert not request.output
    assert request.end is None


@pytest.mark.parametrize("token, end", [(FAILED_ROW, FAILED), (NO_TOKEN, STOPPED_EARLY)])
def test_a_row_without_its_token_ends_with_an_error(token: int, end: Finished) -> None:
    harness = Harness()
    request = harness.submit(1, [1, 2, 3], 9)
    harness.step(ids=np.array([[token]], dtype=np.int32))
    assert request.end == end
    harness.finish()
    assert harness.group.memory.free == LIMITS.pages - 1


def test_results_in_which_every_row_failed_are_counted_until_one_brings_a_token() -> None:
    harness = Harness(overlap=False)

    def answer(*ids: int) -> int:
        harness.step(ids=np.array([ids], dtype=np.int32))
        return harness.group.all_failed_results

    harness.submit(1, [1], 9)
    harness.submit(2, [2], 9)
    assert answer(FAILED_ROW) == 1
    harness.submit(3, [3] * 17, 9)  # a token more than a step takes
    assert answer(FAILED_ROW) == 2
    harness.submit(4, [4], 9)
    assert answer(NO_TOKEN) == 2  # not the prompt's last chunk, which tells nothing
    assert answer(FAILED_ROW, 7) == 0
    assert answer(FAILED_ROW) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"plan_id": 17},
        {"ids": np.zeros((2, 1), dtype=np.int32)},
        {"ids": np.zeros((1, 2), dtype=np.int32)},
        {"slot_epochs": np.zeros(2, dtype=np.int32)},
        {"ids": np.array([[50]], dtype=np.int32)},
        {"ids": np.array([[-3]], dtype=np.int32)},
    ],
)
def test_a_result_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    harness = Harness()
    harness.submit(1, [1, 2, 3], 9)
    with pytest.raises(ProtocolError):
        harness.step(**changes)


def test_the_tokens_of_a_burst_are_counted_up_to_the_end_of_each_request() -> None:
    harness = Harness(bursts=True)
    _, _, before = METRICS.token_counts()
    requests = [harness.submit(number, [number], max_tokens, ignore_eos=True) for number, max_tokens in ((1, 5), (2, 12), (3, 40))]
    harness.finish()
    assert max(plan.iterations for plan in harness.plans) > 1
    assert [len(request.output) for request in requests] == [5, 12, 40]
    _, _, after = METRICS.token_counts()
    assert after["group"] - before["group"] == 5 + 12 + 40


def test_evacuated_requests_go_on_elsewhere_with_what_they_have() -> None:
    harness, other = Harness(), Harness()
    running, waiting = harness.submit(1, [1, 2, 3], 30), [harness.submit(number, [1], 30) for number in range(2, 6)]
    for _ in range(5):
        harness.step()
    requests = harness.group.evacuate()
    assert {running, *waiting} == set(requests)
    had = len(running.output)
    assert had
    for request in requests:
        other.group.submit(request, 0.0)
    other.finish()
    assert [len(request.output) for request in requests] == [30] * 5
    assert other.plans[0].prefill_lengths[0] == 3 + had
