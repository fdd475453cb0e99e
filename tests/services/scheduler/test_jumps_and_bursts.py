"""What a plan that jumps, and a burst, may hold: invariants over every plan that a group sends, in any order of events."""

from collections import deque

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.ends import Finished
from services.scheduler.group import Group
from services.scheduler.pages import PageState
from services.scheduler.requests import Request
from services.scheduler.steps import StepResult
from services.worker.order import LaunchOrder
from shared.protocol.generation_pb2 import FINISH_REASON_CANCELLED
from shared.protocol.plan import Limits, Plan, PlanFlag
from tests.services.scheduler.build import METRICS, make_request
from tests.services.scheduler.device import Device, next_token

LIMITS = Limits(slots=4, pages=17, page_size=2, max_length=16, max_step_tokens=6, vocab_size=30)
CANCELLED = Finished(FINISH_REASON_CANCELLED)


class JumpMachine(RuleBasedStateMachine):
    """Every plan is launched whole, as far behind as the rules like; then its result comes at once or later."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.submitted = self.ended = 0
        self.order: LaunchOrder[Plan] = LaunchOrder()
        self.waiting: dict[int, Plan] = {}  # sent and not launched
        self.results: deque[StepResult] = deque()
        self.live: dict[int, Request] = {}
        # Without the prefix cache, so that no page is in two hands for good reason.
        self.wakes: deque[float] = deque()  # seconds after which the group wants to be called
        engine = METRICS.engine("group")
        self.group = Group("group", LIMITS, 0, 6, True, self.send, self.deliver, engine, prefix_cache=False, wake=self.wakes.append)
        self.group.lead.on_result(4_000, late_us=0)  # a distance, so that plans queue
        self.device = Device(LIMITS, self.group.memory.pool)

    def send(self, plan: Plan) -> None:
        if plan.flags & PlanFlag.JUMP:
            self.check_jump(plan)
        self.check_burst(plan)
        self.waiting[plan.plan_id] = plan
        self.order.add(plan, 1, jump=bool(plan.flags & PlanFlag.JUMP))

    def check_jump(self, jump: Plan) -> None:
        assert not len(jump.decode_slots)
        assert not len(jump.release_slots)
        assert sorted(jump.prefill_slots) == sorted(jump.admissions["slot"])
        starts = dict(zip(jump.prefill_slots.tolist(), jump.prefill_starts.tolist(), strict=True))
        writes = np.array(
            [index * LIMITS.page_size >= starts[slot] for slot, index in zip(jump.grant_slots, jump.grant_indexes, strict=True)]
        )
        assert (self.group.memory.pool.state[jump.grant_pages[~writes]] == PageState.CACHED).all()  # nobody is to write what it reads
        assert set(jump.grant_slots) <= set(jump.prefill_slots)
        for overtaken in self.waiting.values():
            if overtaken.flags & PlanFlag.JUMP:
                continue
            assert not set(jump.prefill_slots) & {*overtaken.row_slots, *overtaken.release_slots, *overtaken.admissions["slot"]}
            assert not set(jump.grant_pages[writes]) & set(overtaken.grant_pages)

    def check_burst(self, plan: Plan) -> None:
        assert plan.iterations == 1 or not len(plan.prefill_slots)
        slots = self.group.slots
        for slot in plan.decode_slots.tolist():
            assert slots.planned[slot] <= slots.max_length[slot]
            # All iterations have pages: the token that the last one samples is not written.
            assert slots.num_pages[slot] * LIMITS.page_size >= slots.planned[slot] - 1

    def deliver(self, updated: list[Request], now: float) -> None:
        for request in updated:
            ids = request.prompt_ids.tolist() + list(request.output)
            for index in range(len(request.prompt_ids), len(ids)):
                assert ids[index] == next_token(ids[:index], LIMITS.vocab_size)
            if request.end is not None:
                del self.live[request.key.request]

    @rule(prompt=st.lists(st.integers(0, 29), min_size=1, max_size=9), max_tokens=st.integers(1, 7))
    def submit(self, prompt: list[int], max_tokens: int) -> None:
        request = make_request(self.submitted, prompt, max_tokens, ignore_eos=bool(max_tokens % 2))
        self.live[self.submitted] = request
        self.submitted += 1
        self.group.submit(request, self.now)

    @precondition(lambda self: bool(self.waiting))
    @rule(count=st.integers(1, 3))
    def launch(self, count: int) -> None:
        for _ in range(count):
            plan = self.order.head()
            if plan is None:
                return
            self.order.advance()
            del self.waiting[plan.plan_id]
            self.results.append(self.device.run(plan))

    @precondition(lambda self: self.results)
    @rule(count=st.integers(1, 3))
    def return_results(self, count: int) -> None:
        for _ in range(min(count, len(self.results))):
            self.now += 0.001
            self.group.on_result(self.results.popleft(), self.now)

    @precondition(lambda self: self.wakes)
    @rule()
    def wake(self) -> None:
        self.now += self.wakes.popleft()
        self.group.on_time(self.now)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.group.end(self.live[data.draw(st.sampled_from(sorted(self.live)))], CANCELLED, self.now)

    @invariant()
    def books_agree(self) -> None:
        self.group.memory.pool.check()
        if self.live:
            assert self.waiting or self.results

    def teardown(self) -> None:
        while len(self.order) or self.results:
            self.launch(3)
            self.return_results(3)
        while self.wakes:
            self.wake()
        assert not self.live
        assert not self.group.num_outstanding
        assert self.group.slots.num_free == LIMITS.slots


JumpMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestJumpsAndBursts = JumpMachine.TestCase


def test_a_newcomer_jumps_decode_plans_that_are_queued_and_only_those() -> None:
    plans: list[Plan] = []
    group = Group("group", LIMITS, 0, 6, True, plans.append, lambda updated, now: None, METRICS.engine("group"))
    group.lead.on_result(30_000, late_us=0)
    group.submit(make_request(1, [1, 2, 3], 10, ignore_eos=True), 0.0)
    assert [bool(plan.flags & PlanFlag.JUMP) for plan in plans] == [False] * len(plans)
    before = len(plans)
    assert before >= 2
    group.submit(make_request(2, [5, 6, 7, 8, 9, 1, 2, 3], 3), 0.0)
    jump, *others = plans[before:]
    assert jump.admissions["slot"].tolist() == jump.prefill_slots.tolist()
    assert jump.flags == PlanFlag.JUMP
    assert jump.prefill_ids.tolist() == [5, 6, 7, 8, 9, 1]  # no more than a step's budget
    assert not any(plan.flags for plan in others)  # the rest of the prompt comes in order
