"""A group against a device of plain Python that executes its plans late: no token lost, no page in two hands, whatever comes between."""

from collections import deque

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.scheduler.group import FAILED, Group
from services.scheduler.pages import PageState
from services.scheduler.requests import Finished, Request
from services.scheduler.slots import SlotState
from services.scheduler.steps import StepResult
from shared.protocol.generation_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_LENGTH, FINISH_REASON_STOP
from shared.protocol.plan import Limits, Plan
from tests.services.scheduler.build import METRICS, make_request
from tests.services.scheduler.device import FAIL, Device, next_token

LIMITS = Limits(slots=3, pages=11, page_size=2, max_length=14, max_step_tokens=6, vocab_size=9)
ENGINE = METRICS.engine("group")
CANCELLED = Finished(FINISH_REASON_CANCELLED)


def model(ids: list[int], vocab_size: int) -> int:
    """As `next_token`, but some sequences have logits that are not finite."""
    token = next_token(ids, 10 * vocab_size)
    return FAIL if token == 1 else token % vocab_size


class GroupMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.submitted = 0
        self.delivered: dict[int, list[int]] = {}  # what a gateway has, by request
        self.live: dict[int, Request] = {}
        self.slot_epoch = 3

    @initialize(max_step_tokens=st.sampled_from([1, 2, 3, 6]), overlap=st.sampled_from([True, True, False]))
    def choose(self, max_step_tokens: int, overlap: bool) -> None:
        self.max_step_tokens, self.overlap = max_step_tokens, overlap
        self.start()

    def start(self) -> None:
        self.plans: deque[Plan] = deque()
        self.results: deque[StepResult] = deque()
        self.group = Group("group", LIMITS, self.slot_epoch, self.max_step_tokens, self.overlap, self.plans.append, self.deliver, ENGINE)
        self.device = Device(LIMITS, owner_of=lambda page: int(self.group.pool.owner[page]), model=model)
        for slot in self.device.slots:
            slot.epoch = self.slot_epoch

    def deliver(self, updated: list[Request], now: float) -> None:
        for request in updated:
            got = self.delivered[request.key.request]
            got.extend(request.output[len(got) :])
            if request.end is not None:
                del self.live[request.key.request]
                self.check_end(request)

    def check_end(self, request: Request) -> None:
        prompt, output = request.prompt_ids.tolist(), list(request.output)
        assert output == self.delivered[request.key.request]
        for index, token in enumerate(output):
            assert token == model(prompt + output[:index], LIMITS.vocab_size)
        for index, token in enumerate(output[:-1]):  # it should have ended here
            assert index + 1 <= request.min_tokens or token not in request.ending_ids
        assert len(output) <= request.max_tokens
        match request.end:
            case Finished(reason) if reason == FINISH_REASON_STOP:
                assert output[-1] in request.ending_ids
                assert len(output) > request.min_tokens
            case Finished(reason) if reason == FINISH_REASON_LENGTH:
                assert len(output) == request.max_tokens
            case end if end == FAILED:
                assert model(prompt + output, LIMITS.vocab_size) == FAIL
            case end:
                assert end == CANCELLED

    @rule(
        prompt=st.lists(st.integers(0, 8), min_size=1, max_size=10),
        max_tokens=st.integers(1, 13),
        min_tokens=st.integers(0, 3),
        ignore_eos=st.booleans(),
        stop_ids=st.sampled_from([(), (), (4,), (4, 5)]),
    )
    def submit(self, prompt: list[int], max_tokens: int, min_tokens: int, ignore_eos: bool, stop_ids: tuple[int, ...]) -> None:
        max_tokens = min(max_tokens, LIMITS.max_length - len(prompt))
        request = make_request(self.submitted, prompt, max_tokens, min_tokens=min_tokens, ignore_eos=ignore_eos, stop_ids=stop_ids)
        self.delivered[self.submitted] = []
        self.live[self.submitted] = request
        self.submitted += 1
        self.group.submit(request, self.now)

    @precondition(lambda self: self.plans)
    @rule(count=st.integers(1, 3))
    def compute(self, count: int) -> None:
        for _ in range(min(count, len(self.plans))):
            self.results.append(self.device.run(self.plans.popleft()))

    @precondition(lambda self: self.results)
    @rule(count=st.integers(1, 3), delay_us=st.sampled_from([0, 300, 2_000]))
    def return_results(self, count: int, delay_us: int) -> None:
        self.now += delay_us / 1e6
        for _ in range(min(count, len(self.results))):
            self.group.on_result(self.results.popleft(), self.now)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        self.group.end(request, CANCELLED, self.now)
        assert request.key.request not in self.live

    @rule()
    def lose_the_group(self) -> None:
        """Its requests go on in another, with the tokens they have."""
        self.slot_epoch = max(slot.epoch for slot in self.device.slots)
        requests = self.group.evacuate()
        assert {request.key.request for request in requests} == set(self.live)
        assert len(requests) == len(self.live)
        self.start()
        for request in requests:
            self.group.submit(request, self.now)

    @invariant()
    def books_agree(self) -> None:
        group, slots = self.group, self.group.slots
        group.pool.check()
        assert sum(group.pool.count(state) for state in PageState) == LIMITS.pages
        for slot in range(LIMITS.slots):
            owned = np.flatnonzero(group.pool.owner == slot)
            assert sorted(slots.pages(slot).tolist()) == owned.tolist()
            is_running = slots.state[slot] in (SlotState.PREFILL, SlotState.DECODE)
            assert (slots.requests[slot] is not None) == is_running
            if is_running:
                assert slots.planned[slot] <= slots.max_length[slot]
        running = [request for request in slots.requests if request is not None]
        assert group.num_running == len(running)
        assert group.promised_pages == sum(
            -(-(request.max_length - 1) // LIMITS.page_size) - int(slots.num_pages[request.slot]) for request in running
        )
        assert group.promised_pages <= group.pool.num_ready
        assert len(running) + len(group.waiting) == len(self.live)

    @invariant()
    def the_device_is_kept_busy(self) -> None:
        if self.live:
            assert self.plans or self.results, "requests are left and nothing is on its way"

    def teardown(self) -> None:
        for _ in range(10_000):
            if not self.plans and not self.results:
                break
            self.compute(3)
            self.return_results(3, 100)
        assert not self.live
        assert not self.group.waiting.tokens
        assert self.group.pool.num_ready == LIMITS.pages - 1
        assert not self.group.num_outstanding
        assert self.group.slots.num_free == LIMITS.slots
        assert (self.group.slots.state == SlotState.FREE).all()


GroupMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestGroup = GroupMachine.TestCase
