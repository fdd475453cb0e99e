"""Log-probabilities on their way through the scheduler: nothing is lost, repeated, or taken on trust."""

from typing import Any

import numpy as np
import pytest

from services.scheduler import session as sessions
from services.scheduler.ends import Finished
from services.scheduler.group import Group
from services.scheduler.requests import Request
from services.scheduler.scores import Scores
from services.scheduler.steps import StepResult
from shared.errors import ProtocolError
from shared.protocol import generation_pb2 as pb
from shared.protocol.logprobs import LOGPROB, NO_TOP_ID, Logprobs
from shared.protocol.plan import Limits, Plan, RowFlag, SlotFlag
from tests.services.scheduler.build import METRICS, make_request
from tests.services.scheduler.test_session import Harness

PROMPT = [1, 2, 3, 4, 5]
LIMITS = Limits(slots=4, pages=50, page_size=2, max_length=60, max_step_tokens=8, vocab_size=100)


def records(*positions: int, row: int = 0, vocab_size: int = 100) -> Logprobs:
    """Token n at position n, with log-probability -n."""
    made = np.zeros(len(positions), dtype=LOGPROB)
    made["row"], made["position"], made["logprob"] = row, positions, [-position for position in positions]
    ranks = np.arange(20)
    made["top_ids"] = np.where(ranks < vocab_size, ranks, NO_TOP_ID)
    made["top_logprobs"] = -ranks
    return made


def request_with(top: int | None, prompt_top: int | None = None, max_tokens: int = 9, **fields: Any) -> Request:
    return make_request(1, PROMPT, max_tokens, scores=Scores(len(PROMPT), top, prompt_top), **fields)


class OneGroup:
    """A group whose worker is the test."""

    def __init__(self, request: Request) -> None:
        self.plans: list[Plan] = []
        self.request = request
        self.group = Group("g", LIMITS, 0, 8, False, self.plans.append, lambda requests, now: None, METRICS.engine("g"))
        self.group.submit(request, 0.0)

    def answer(self, *ids: int, logprobs: Logprobs, epoch: int = 1) -> None:
        """The result of the last plan."""
        plan = self.plans[-1]
        result = StepResult(plan.plan_id, np.array([ids], dtype=np.int32), np.full(len(ids), epoch, dtype=np.int32), 10, 0, 10, 0, logprobs)
        self.group.on_result(result, 1.0)


def test_admissions_and_rows_say_what_is_wanted() -> None:
    one = OneGroup(request_with(top=0, prompt_top=3))
    (plan,) = one.plans
    assert plan.admissions["flags"].tolist() == [SlotFlag.LOGPROBS]
    assert plan.admissions["prompt_length"].tolist() == [5]
    assert plan.prefill_flags.tolist() == [RowFlag.SAMPLE | RowFlag.SCORE]
    plain = OneGroup(make_request(2, PROMPT, 3))
    assert (plain.plans[0].admissions["flags"].tolist(), plain.plans[0].prefill_flags.tolist()) == ([0], [RowFlag.SAMPLE])


def test_a_token_without_its_log_probability_is_refused() -> None:
    one = OneGroup(request_with(top=2))
    with pytest.raises(ProtocolError, match="a token came without its log-probability"):
        one.answer(7, logprobs=records(4))


def test_a_first_token_before_the_prompts_scores_is_refused() -> None:
    one = OneGroup(request_with(top=None, prompt_top=2))
    with pytest.raises(ProtocolError, match="only 3 of 5"):
        one.answer(7, logprobs=records(1, 2))


@pytest.mark.parametrize("positions", [(2, 3, 4), (1, 3, 4), (1, 1, 2)])
def test_scores_that_do_not_follow_are_refused(positions: tuple[int, ...]) -> None:
    one = OneGroup(request_with(top=None, prompt_top=2))
    with pytest.raises(ProtocolError, match="log-probabilities of a prompt"):
        one.answer(7, logprobs=records(*positions))


@pytest.mark.parametrize("change", [{"row": 1}, {"row": -1}, {"top_ids": 100}, {"top_ids": -2}])
def test_records_of_rows_or_ids_that_are_not_there_are_refused(change: dict[str, int]) -> None:
    one = OneGroup(request_with(top=2))
    made = records(5)
    for name, value in change.items():
        made[name] = value
    with pytest.raises(ProtocolError, match="log-probabilities of"):
        one.answer(7, logprobs=made)


def test_a_prompt_whose_scores_are_not_finite_ends_the_request_and_is_shared_with_nobody() -> None:
    one = OneGroup(request_with(top=None, prompt_top=2))
    broken = records(1, 2, 3, 4)
    broken["logprob"][2] = np.nan
    one.answer(7, logprobs=broken)
    assert isinstance(one.request.end, Finished)
    assert one.request.end.reason == pb.FINISH_REASON_ERROR
    assert one.request.scores is not None
    assert one.request.scores.unsent == 0  # it may be computed anew, elsewhere
    assert one.group.memory.cache.lookup("", np.array([*PROMPT, 6], dtype=np.int32)).num_pages == 0


def test_a_prompt_that_is_scored_takes_nothing_from_the_cache_and_gives_to_it() -> None:
    one = OneGroup(request_with(top=None, prompt_top=2, max_tokens=1))
    one.answer(7, logprobs=records(1, 2, 3, 4))
    assert one.group.memory.cache.lookup("", np.array([*PROMPT, 6], dtype=np.int32)).num_pages == 2
    one.group.submit(request_with(top=None, prompt_top=0, max_tokens=1), 2.0)
    assert one.plans[-1].prefill_starts.tolist() == [0]
    one.answer(7, logprobs=records(1, 2, 3, 4), epoch=2)
    one.group.submit(make_request(2, [*PROMPT, 6], 1), 3.0)
    assert one.plans[-1].prefill_starts.tolist() == [4]


async def test_log_probabilities_travel_with_their_tokens_and_as_many_alternatives_as_wanted() -> None:
    harness, request = Harness(), request_with(top=2, prompt_top=1)
    assert request.scores is not None
    assert request.scores.take_prompt(records(1, 2, 3, 4))
    request.scores.take_token(records(5).tobytes())
    harness.token(request, 11)
    prompt, tokens = (await harness.batch()).tokens
    assert (prompt.first_position, prompt.prompt_logprobs.top, prompt.ids) == (1, 1, b"")
    assert np.frombuffer(prompt.prompt_logprobs.values, "<f4").tolist() == [-1, -2, -3, -4]
    assert (tokens.first_index, np.frombuffer(tokens.logprobs.values, "<f4").tolist()) == (0, [-5])
    assert np.frombuffer(tokens.logprobs.top_ids, "<i4").tolist() == [0, 1]
    request.scores.take_token(records(6).tobytes())
    harness.token(request, 12, after_s=1.0)
    (tokens,) = (await harness.batch()).tokens
    assert (tokens.first_index, np.frombuffer(tokens.logprobs.values, "<f4").tolist()) == (1, [-6])


async def test_a_vocabulary_smaller_than_what_is_wanted_gives_all_of_it() -> None:
    harness, request = Harness(), request_with(top=20)
    assert request.scores is not None
    request.scores.take_token(records(5, vocab_size=7).tobytes())
    harness.token(request, 3)
    (tokens,) = (await harness.batch()).tokens
    assert (tokens.logprobs.top, np.frombuffer(tokens.logprobs.top_ids, "<i4").tolist()) == (7, list(range(7)))


async def test_a_batch_holds_so_many_and_the_end_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_BATCH_LOGPROBS", 3)
    harness, request = Harness(), request_with(top=0, prompt_top=0)
    other = make_request(2, [1], 9)
    assert request.scores is not None
    request.scores.take_prompt(records(1, 2, 3, 4))
    for token in range(4):
        request.scores.take_token(records(5 + token).tobytes())
        request.output.append(token)
    request.end = Finished(pb.FINISH_REASON_LENGTH)
    harness.session.update(request)
    harness.token(other, 8)
    values, positions, indexes = [], [], []
    while True:
        batch = await harness.batch()
        assert sum(len(tokens.logprobs.values) + len(tokens.prompt_logprobs.values) for tokens in batch.tokens) <= 12
        for tokens in batch.tokens:
            if tokens.request == request.key.request:
                positions += [tokens.first_position] * bool(tokens.prompt_logprobs.values)
                indexes += [tokens.first_index] * bool(tokens.ids)
                values += np.frombuffer(tokens.prompt_logprobs.values + tokens.logprobs.values, "<f4").tolist()
        if batch.finished:
            break
    assert values == [-1, -2, -3, -4, -5, -6, -7, -8]
    assert (positions, indexes) == ([1, 4], [0, 2])
    assert [finished.completion_tokens for finished in batch.finished] == [4]
