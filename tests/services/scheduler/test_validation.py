from typing import Any

import numpy as np
import pytest

from services.scheduler.model import Model
from services.scheduler.requests import Key, Sampling
from services.scheduler.validation import MAX_TEXT, Refused, to_request
from shared.protocol import generation_pb2 as pb
from shared.protocol.plan import MAX_BIASES, MAX_REPETITION, MAX_STOP_IDS, ids_to_bytes

MODEL = Model("abc", vocab_size=100, max_length=50, eos_ids=frozenset({0}), files=())


def submit(**fields: Any) -> pb.Submit:
    defaults: dict[str, Any] = {
        "request": 5,
        "attempt": 2,
        "prompt_ids": ids_to_bytes([1, 2, 3]),
        "max_tokens": 10,
        "sampling": pb.Sampling(seed=7),
    }
    return pb.Submit(**(defaults | fields))


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": pb.Sampling(**({"seed": 7} | fields))}


def test_what_is_absent_is_off() -> None:
    request = to_request(submit(), session=9, model=MODEL, now=100.0)
    assert (request.key, request.attempt, request.prompt_ids.tolist()) == (Key(9, 5), 2, [1, 2, 3])
    assert request.sampling == Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7)
    assert (request.min_tokens, request.ending_ids, request.deadline) == (0, frozenset({0}), None)


def test_zero_is_a_value() -> None:
    request = to_request(submit(deadline_ms=0, **sampling(temperature=0, top_p=0, seed=0)), 9, MODEL, now=100.0)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.seed) == (0.0, 0.0, 0)
    assert request.deadline == 100.0


def test_what_ends_a_request() -> None:
    stops = ids_to_bytes([7, 8])
    assert to_request(submit(stop_token_ids=stops), 9, MODEL, 0.0).ending_ids == {0, 7, 8}
    assert to_request(submit(stop_token_ids=stops, ignore_eos=True), 9, MODEL, 0.0).ending_ids == {7, 8}


def test_a_resumed_request_has_what_was_delivered() -> None:
    request = to_request(submit(delivered_ids=ids_to_bytes([4, 5])), 9, MODEL, 0.0)
    assert (list(request.output), request.sent, request.prefill_ids.tolist()) == ([4, 5], 2, [1, 2, 3, 4, 5])


def floats(*values: float) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def test_penalties_and_biases_are_taken_and_absent_ones_are_off() -> None:
    how = to_request(submit(), 9, MODEL, 0.0).sampling
    assert (how.penalises, how.biases) == (False, ())
    fields = {"presence_penalty": -2.0, "frequency_penalty": 0.5, "repetition_penalty": 1 / MAX_REPETITION}
    how = to_request(submit(**sampling(**fields, bias_ids=ids_to_bytes([99, 3]), bias_values=floats(-100, 0.5))), 9, MODEL, 0.0).sampling
    assert {name: getattr(how, name) for name in fields} == fields
    assert (how.penalises, how.biases) == (True, ((99, -100.0), (3, 0.5)))
    assert not to_request(submit(**sampling(presence_penalty=0.0, repetition_penalty=1.0)), 9, MODEL, 0.0).sampling.penalises


def test_lpb_03_no_alternatives_is_not_no_log_probabilities() -> None:
    assert to_request(submit(), 9, MODEL, 0.0).scores is None
    scores = to_request(submit(logprobs=0), 9, MODEL, 0.0).scores
    assert scores is not None
    assert (scores.top, scores.prompt_top, scores.needs_prompt) == (0, None, False)
    request = to_request(submit(prompt_logprobs=0), 9, MODEL, 0.0)
    assert request.scores is not None
    assert (request.scores.top, request.scores.prompt_top, request.needs_scores) == (None, 0, True)


def test_smp_01_no_tokens_is_a_value_where_the_prompt_is_scored() -> None:
    assert to_request(submit(max_tokens=0, prompt_logprobs=2), 9, MODEL, 0.0).max_tokens == 0
    assert not to_request(submit(max_tokens=0, prompt_logprobs=2, prompt_ids=ids_to_bytes([1])), 9, MODEL, 0.0).needs_scores
    with pytest.raises(Refused):
        to_request(submit(max_tokens=0, logprobs=2), 9, MODEL, 0.0)


def test_who_has_tokens_has_the_scores_of_the_prompt() -> None:
    assert not to_request(submit(prompt_logprobs=2, delivered_ids=ids_to_bytes([4])), 9, MODEL, 0.0).needs_scores
    assert to_request(submit(prompt_logprobs=2, attempt=3), 9, MODEL, 0.0).needs_scores


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 21},
        {"prompt_logprobs": 21},
        sampling(presence_penalty=2.1),
        sampling(frequency_penalty=-2.1),
        sampling(frequency_penalty=float("nan")),
        sampling(repetition_penalty=0.0),
        sampling(repetition_penalty=float("inf")),
        sampling(bias_ids=ids_to_bytes([100]), bias_values=floats(1)),
        sampling(bias_ids=ids_to_bytes([-1]), bias_values=floats(1)),
        sampling(bias_ids=ids_to_bytes([1, 1]), bias_values=floats(1, 2)),
        sampling(bias_ids=ids_to_bytes([1, 2]), bias_values=floats(1)),
        sampling(bias_ids=ids_to_bytes([1]), bias_values=floats(101)),
        sampling(bias_ids=ids_to_bytes([1]), bias_values=floats(float("nan"))),
        sampling(bias_ids=ids_to_bytes([1] * (MAX_BIASES + 1)), bias_values=floats(*[1] * (MAX_BIASES + 1))),
        {"prompt_ids": b""},
        {"prompt_ids": b"12345"},
        {"prompt_ids": ids_to_bytes([100])},
        {"prompt_ids": ids_to_bytes([-1])},
        {"delivered_ids": ids_to_bytes([100])},
        {"delivered_ids": ids_to_bytes([1] * 11)},
        {"stop_token_ids": ids_to_bytes([-1])},
        {"stop_token_ids": ids_to_bytes([1] * (MAX_STOP_IDS + 1))},
        {"attempt": 0},
        {"max_tokens": 0},
        {"min_tokens": 11},
        {"priority": 2**31 - 1},
        {"tenant": "x" * (MAX_TEXT + 1)},
        {"request_id": "x" * (MAX_TEXT + 1)},
        {"sampling": pb.Sampling()},
        sampling(temperature=-0.1),
        sampling(temperature=float("nan")),
        sampling(temperature=float("inf")),
        sampling(top_p=1.5),
        sampling(top_k=-1),
        sampling(min_p=-0.5),
    ],
)
def test_refused_as_invalid(fields: dict[str, Any]) -> None:
    with pytest.raises(Refused) as caught:
        to_request(submit(**fields), 9, MODEL, 0.0)
    assert caught.value.reason == pb.REJECT_REASON_INVALID


@pytest.mark.parametrize("prompt, max_tokens", [(50, 1), (41, 10), (3, 2**32 - 1), (3, 2**31 - 1)])
def test_refused_as_too_long(prompt: int, max_tokens: int) -> None:
    with pytest.raises(Refused) as caught:
        to_request(submit(prompt_ids=ids_to_bytes([1] * prompt), max_tokens=max_tokens), 9, MODEL, 0.0)
    assert caught.value.reason == pb.REJECT_REASON_TOO_LONG
