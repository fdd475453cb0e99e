"""A group of the scheduler over a real engine, in one process and without a wire: plans go to the engine as bytes, results come back."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from services.scheduler.group import Group
from services.scheduler.requests import Request
from services.scheduler.scores import Scores
from services.scheduler.steps import StepResult
from services.worker.engine.interface import Engine, Step
from services.worker.order import LaunchOrder
from shared.protocol.logprobs import Logprobs, logprobs_from_bytes
from shared.protocol.plan import Int32s, Limits, Plan, PlanFlag, check, decode, encode
from tests.services.scheduler.build import METRICS, make_request

STEP_US = 1000


@dataclass(eq=False)
class _Sent:
    plan: Plan
    words: Int32s
    slot_epochs: Int32s
    step: Step | None = None
    ids: list[Int32s] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)


class Joined:
    """`run` plays the device: an iteration at a time, plans that jump before those that do not, while the group sends further ones."""

    def __init__(self, engine: Engine, page_size: int, slots: int = 8, **options: Any) -> None:
        """options: of the Group; `pages` limits what it may use of the engine's."""
        facts = engine.facts
        pages, step_tokens = options.pop("pages", facts.pages), options.pop("max_step_tokens", 64)
        self.limits = Limits(slots, pages, page_size, facts.max_length, step_tokens, facts.vocab_size)
        engine.reset()
        self.engine, self.ended, self.plans = engine, list[Request](), list[Plan]()
        self._order: LaunchOrder[_Sent] = LaunchOrder()
        self._epochs = np.zeros(slots, dtype=np.int32)
        self._now_us = 0
        self.group = Group("joined", self.limits, 0, step_tokens, True, self._send, self._deliver, METRICS.engine("joined"), **options)

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.group.submit(request, self._now_us / 1e6)

    def run(self, *requests: Request, until_tokens: int | None = None) -> None:
        """Until all have ended, or together have so many tokens."""
        while not all(request.end for request in requests):
            if until_tokens is not None and sum(len(request.output) for request in requests) >= until_tokens:
                return
            self._iterate()

    def _send(self, plan: Plan) -> None:
        check(plan, self.limits)
        self.plans.append(plan)
        words = np.frombuffer(bytearray(encode(plan)), dtype=np.int32)
        self._epochs[plan.admissions["slot"]] = plan.admissions["epoch"]
        sent = _Sent(decode(words.data.cast("B")), words, self._epochs[plan.row_slots])
        self._order.add(sent, plan.iterations, jump=bool(plan.flags & PlanFlag.JUMP))

    def _iterate(self) -> None:
        sent = self._order.head()
        assert sent is not None, "requests wait, and the group has sent no plan"
        self._order.advance()
        sent.step = sent.step or self.engine.begin(sent.plan, sent.words)
        flight = sent.step.launch()
        sent.ids.append(flight.ids())
        sent.logprobs.append(flight.logprobs())
        self._now_us += STEP_US
        if len(sent.ids) == sent.plan.iterations:
            took_us = STEP_US * sent.plan.iterations
            result = StepResult(
                plan_id=sent.plan.plan_id,
                ids=np.stack(sent.ids),
                slot_epochs=sent.slot_epochs,
                hold_us=took_us,
                start_us=self._now_us - took_us,
                end_us=self._now_us,
                idle_us=0,
                logprobs=np.concatenate(sent.logprobs),
            )
            self.group.on_result(result, self._now_us / 1e6)

    def _deliver(self, requests: list[Request], now: float) -> None:
        self.ended += [request for request in requests if request.end is not None]


def completion_scores(request: Request) -> Logprobs:
    """Records of its completion's tokens."""
    assert request.scores is not None
    return logprobs_from_bytes(b"".join(request.scores.completion))


def scored_request(
    number: int, prompt: list[int], max_tokens: int, *, top: int | None = 5, prompt_top: int | None = None, **sampling: Any
) -> Request:
    """One that wants log-probabilities, greedy unless `sampling` says otherwise."""
    return sampled(make_request(number, prompt, max_tokens, scores=Scores(len(prompt), top, prompt_top), ignore_eos=True), **sampling)


def sampled(request: Request, **sampling: Any) -> Request:
    """The same request, sampled otherwise."""
    request.sampling = replace(request.sampling, **sampling)
    return request
