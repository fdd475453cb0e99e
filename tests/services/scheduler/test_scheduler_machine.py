"""All that gateways, workers and time can do to a scheduler, in any order: each attempt ends exactly once, with the right tokens."""

from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.scheduler.ends import End, Finished
from services.scheduler.group import Group
from services.scheduler.health import Health
from services.scheduler.model import Model
from services.scheduler.requests import Key, Request
from services.scheduler.scheduler import Scheduler
from shared.protocol import generation_pb2 as pb
from shared.protocol.logprobs import logprobs_from_bytes
from shared.protocol.plan import Limits, Plan
from tests.services.scheduler import session_client
from tests.services.scheduler.build import METRICS
from tests.services.scheduler.device import EOS, Device, logprob, next_token

LIMITS = Limits(slots=2, pages=9, page_size=2, max_length=12, max_step_tokens=4, vocab_size=9)
MODEL = Model("abc", vocab_size=9, max_length=12, eos_ids=frozenset({EOS}), files=())
SESSIONS = (1, 2)
PROMPT = (3, 4)
MAX_TOKENS = 8
GROUP_WAIT_S = 5.0
WANTED: tuple[dict[str, int], ...] = ({}, {"logprobs": 0}, {"prompt_logprobs": 1}, {"logprobs": 1, "prompt_logprobs": 0})
ENGINE = METRICS.engine("group")

sessions, numbers = st.sampled_from(SESSIONS), st.integers(0, 5)


def answer(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < max_tokens and (not ids or ids[-1] != EOS):
        ids.append(next_token([*prompt, *ids], LIMITS.vocab_size))
    return ids


def check_scores(request: Request) -> None:
    """All that a request wants to know is there, once, before it or its tokens are; nobody here sends it on."""
    scores, ids = request.scores, [*request.prompt_ids.tolist(), *request.output]
    if scores is None:
        return
    prompt, completion = scores.prompt, logprobs_from_bytes(b"".join(scores.completion))
    fresh = len(request.output) > request.resumed_at
    assert not (scores.needs_prompt and fresh)
    if scores.prompt_top is not None:
        assert prompt["position"].tolist() == list(range(1, scores.scored))
    if scores.top is not None:
        assert completion["position"].tolist() == list(range(len(request.prompt_ids) + request.resumed_at, len(ids)))
    for record in (*prompt, *completion):
        position = int(record["position"])
        assert record["logprob"] == logprob(ids[:position], ids[position])


class Running:
    """A group with its device and what is on the way to and from it."""

    def __init__(self, scheduler: Scheduler, health: Health) -> None:
        self.plans: deque[Plan] = deque()
        self.group = Group("group", LIMITS, 0, 4, True, self.plans.append, scheduler.deliver, ENGINE, health=health)
        self.device = Device(LIMITS, self.group.memory.pool)
        self._scheduler = scheduler

    def step(self, now: float) -> None:
        self._scheduler.on_result(self.group, self.device.run(self.plans.popleft()), now)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.scheduler = Scheduler(4, 1_000, GROUP_WAIT_S, self.deliver, METRICS, 0.0)
        self.scheduler.model = MODEL
        self.running: list[Running] = []
        self.healths = [Health(), Health()]
        self.prompts: dict[tuple[Key, int], tuple[int, ...]] = {}  # of attempts that have not ended
        self.attempts: dict[Key, int] = {}
        self.cancelled: dict[Key, int] = {}

    def deliver(self, updated: list[Request], now: float) -> None:
        for request in updated:
            prompt = self.prompts[request.key, request.attempt]
            whole = answer(prompt, MAX_TOKENS)
            assert list(request.output) == whole[: len(request.output)]
            check_scores(request)
            if request.end is not None:
                self.end(request.key, request.attempt, request.end)
                if request.end in (Finished(pb.FINISH_REASON_STOP), Finished(pb.FINISH_REASON_LENGTH)):
                    assert list(request.output) == whole

    def end(self, key: Key, attempt: int, end: End) -> None:
        del self.prompts[key, attempt]  # exactly once
        if self.cancelled.get(key, 0) >= attempt:
            assert isinstance(end, Finished)

    @rule(
        session=sessions,
        number=numbers,
        prompt=st.sampled_from([(1,), PROMPT, (1, 2, 3, 4)]),
        resume=st.integers(0, 4),
        deadline=st.booleans(),
        wanted=st.sampled_from(WANTED),
    )
    def submit(self, session: int, number: int, prompt: tuple[int, ...], resume: int, deadline: bool, wanted: dict[str, int]) -> None:
        key = Key(session, number)
        attempt = self.attempts.get(key, 0) + 1
        self.attempts[key] = attempt
        self.prompts[key, attempt] = prompt
        fields: dict[str, Any] = wanted | ({"deadline_ms": 3_000} if deadline else {})
        message = session_client.submit(number, list(prompt), MAX_TOKENS, attempt, tuple(answer(prompt, MAX_TOKENS)[:resume]), **fields)
        rejected = self.scheduler.submit(message, session, self.now)
        if rejected is not None:
            assert not resume
            self.end(key, attempt, rejected)

    @rule(session=sessions, number=numbers, ahead=st.integers(0, 1))
    def cancel(self, session: int, number: int, ahead: int) -> None:
        key = Key(session, number)
        attempt = self.attempts.get(key, 0) + ahead
        live = any(key == other for other, _ in self.prompts)
        if not live:  # else a Cancel of an attempt that is to come is one of the attempt that is
            self.cancelled[key] = max(attempt, self.cancelled.get(key, 0))
        self.scheduler.cancel(key, attempt, self.now)
        assert not any(key == other for other, _ in self.prompts)

    @rule(session=sessions)
    def lose_a_gateway(self, session: int) -> None:
        self.scheduler.drop_session(session, self.now)
        assert not any(key.session == session for key, _ in self.prompts)

    @precondition(lambda self: len(self.running) < 2)
    @rule()
    def add_a_group(self) -> None:
        health = next(health for health in self.healths if all(running.group.health is not health for running in self.running))
        self.running.append(Running(self.scheduler, health))
        self.scheduler.add_group(self.running[-1].group, self.now)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1), overdue=st.booleans())
    def lose_a_group(self, which: int, overdue: bool = False) -> None:
        running = self.running.pop(which % len(self.running))
        self.scheduler.remove_group(running.group, self.now, overdue=overdue)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1), whole_group=st.booleans())
    def break_rows(self, which: int, whole_group: bool) -> None:
        """The next row of a slot is not finite, or of all of them."""
        slots = self.running[which % len(self.running)].device.slots
        for slot in slots if whole_group else slots[:1]:
            slot.fails = True

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 1))
    def drain_a_group(self, which: int) -> None:
        self.scheduler.drain_group(self.running[which % len(self.running)].group, self.now)

    @rule(which=st.integers(0, 1), count=st.integers(1, 4))
    def compute(self, which: int, count: int) -> None:
        self.now += 0.001
        for running in self.running[which : which + 1]:
            for _ in range(min(count, len(running.plans))):
                running.step(self.now)

    @rule(seconds=st.sampled_from([0.1, 2.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now += seconds
        self.scheduler.tick(self.now)

    @invariant()
    def nobody_is_forgotten(self) -> None:
        assert self.scheduler.num_requests == len(self.prompts)
        placed = sum(running.group.load for running in self.running)
        assert placed + len(self.scheduler._held) == len(self.prompts)
        for running in self.running:
            running.group.memory.pool.check()
            assert not running.group.load or running.plans, "requests are left and nothing is on its way"

    def teardown(self) -> None:
        for running in self.running:
            while running.plans:
                running.step(self.now)
            assert running.group.memory.free == LIMITS.pages - 1
        self.now += 0.001
        while any(running.plans for running in self.running):
            for running in self.running:
                while running.plans:
                    running.step(self.now)
        self.scheduler.tick(self.now + GROUP_WAIT_S)
        assert not self.prompts
        assert not self.scheduler._group_of
        assert not len(self.scheduler._held)


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
