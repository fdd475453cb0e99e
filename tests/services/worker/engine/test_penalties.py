"""Penalties and biases against a count by hand, token for token: cached, chunked, preempted, moved, on several ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.driver import Driver, spec
from services.scheduler.requests import Request
from services.worker.engine.engine import TorchEngine
from shared.protocol.plan import SlotFlag
from tests.services.joined import Joined, sampled
from tests.services.scheduler.build import make_request
from tests.services.worker.engine.test_logprobs import PAGE_SIZE, prompts
from tests.tiny import MAX_LENGTH, tiny_model

NEAR_TIE = 1e-3  # two best logits closer than this may change places
WAYS: list[dict[str, Any]] = [
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.0},
    {"repetition_penalty": 1.8},
    {"frequency_penalty": -0.5, "presence_penalty": -1.0},  # says the same again
    {"repetition_penalty": 0.6, "frequency_penalty": 2.0, "biases": ((7, 4.0), (300, -2.0))},
    {},
    {"biases": ((41, 100.0), (42, -100.0))},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(model: Path) -> TorchEngine:
    return TorchEngine(spec(model, page_size=PAGE_SIZE, num_pages=500), lambda phase, part: None)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def check(reference: Any, request: Request) -> None:
    """Every token is the best, by transformers' logits for what came before it and a count of that by hand."""
    prompt, output, how = request.prompt_ids.tolist(), request.output.tolist(), request.sampling
    all_logits = reference(torch.tensor([[*prompt, *output]])).logits[0].double()
    biases = dict(how.biases)
    for index, token in enumerate(output):
        logits = all_logits[len(prompt) + index - 1].tolist()
        for other in range(len(logits)):
            logits[other] += biases.get(other, 0.0)
            if other in prompt or other in output[:index]:
                logits[other] = logits[other] / how.repetition_penalty if logits[other] > 0 else logits[other] * how.repetition_penalty
            count = output[:index].count(other)
            logits[other] -= how.frequency_penalty * count + how.presence_penalty * (count > 0)
        assert logits[token] >= max(logits) - NEAR_TIE, f"token {index} of {request.request_id}: {token}, not {np.argmax(logits)}"


def requests_of(count: int, max_tokens: int = 25, longest: int = 80) -> list[Request]:
    return [
        sampled(make_request(number, prompt, max_tokens, ignore_eos=True), **WAYS[number % len(WAYS)])
        for number, prompt in enumerate(prompts(count, longest))
    ]


def test_tokens_equal_a_count_by_hand_cold_and_warm_and_chunked(engine: TorchEngine, reference: Any) -> None:
    joined = Joined(engine, PAGE_SIZE, max_step_tokens=24)
    for _ in range(2):
        requests = requests_of(21)
        joined.submit(*requests)
        joined.run(*requests)
        for request in requests:
            check(reference, request)
    assert sum(request.cached_tokens or 0 for request in requests) > 100
    assert any(plan.iterations > 1 for plan in joined.plans)


def test_counts_outlive_preemptions(engine: TorchEngine, reference: Any) -> None:
    joined = Joined(engine, PAGE_SIZE, pages=50, max_step_tokens=16)
    requests = requests_of(8, max_tokens=35, longest=60)
    joined.submit(*requests)
    joined.run(*requests)
    assert sum(request.preemptions for request in requests) >= 2
    for request in requests:
        check(reference, request)


def test_counts_outlive_moves_and_new_attempts(engine: TorchEngine, reference: Any) -> None:
    first = Joined(engine, PAGE_SIZE)
    requests = requests_of(7)
    first.submit(*requests)
    first.run(*requests, until_tokens=60)
    again = [
        sampled(
            make_request(100 + number, each.prompt_ids.tolist(), each.max_tokens, output=tuple(each.output), ignore_eos=True),
            **WAYS[number],
        )
        for number, each in enumerate(requests)
    ]
    second = Joined(engine, PAGE_SIZE)
    second.submit(*again)
    second.run(*again)
    for request in again:
        check(reference, request)


def test_a_slot_forgets_the_request_before(engine: TorchEngine, reference: Any) -> None:
    joined = Joined(engine, PAGE_SIZE, slots=1)
    requests = [
        sampled(make_request(number, [5, 6, 7], 12, ignore_eos=True), **way)
        for number, way in enumerate([WAYS[4], {}, WAYS[1], WAYS[2], {}])
    ]
    joined.submit(*requests)
    joined.run(*requests)
    for request in requests:
        check(reference, request)
    assert requests[1].output == requests[4].output


def test_smp_07_a_bias_holds_for_its_request_alone(engine: TorchEngine) -> None:
    def run(*ways: dict[str, Any]) -> list[list[int]]:
        joined = Joined(engine, PAGE_SIZE)
        requests = [sampled(make_request(number, [5, 6, 7], 8, ignore_eos=True), **way) for number, way in enumerate(ways)]
        joined.submit(*requests)
        joined.run(*requests)
        return [request.output.tolist() for request in requests]

    (alone,) = run({})
    forced, neighbour, forbidden = run({"biases": ((65, 100.0),)}, {}, {"biases": ((alone[0], -100.0),)})
    assert forced == [65] * 8
    assert neighbour == alone
    assert alone[0] not in forbidden


def test_smp_01_a_penalty_of_zero_is_none(engine: TorchEngine) -> None:
    tokens = []
    for way in ({}, {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "biases": ()}):
        joined = Joined(engine, PAGE_SIZE)
        request = sampled(make_request(1, [5, 6, 7], 20, ignore_eos=True), **way)
        joined.submit(request)
        joined.run(request)
        assert not any(int(plan.admissions["flags"].max(initial=0)) & SlotFlag.PENALTIES for plan in joined.plans)
        tokens.append(request.output)
    assert tokens[0] == tokens[1]


def test_many_biases_are_admitted_over_several_plans(engine: TorchEngine) -> None:
    joined = Joined(engine, PAGE_SIZE, max_step_tokens=64)
    ids = [token for token in range(384) if token != 50][:300]
    requests = [
        sampled(make_request(number, [5, 6, 7], 3, ignore_eos=True), biases=tuple((token, -90.0) for token in ids)) for number in range(12)
    ]
    joined.submit(*requests)
    joined.run(*requests)
    for request in requests:
        assert not set(request.output) & set(ids)


def test_a_row_is_the_same_beside_rows_with_penalties(engine: TorchEngine) -> None:
    """What a captured step can do for others changes no bit of a row."""
    engine.reset()
    driver = Driver(engine, PAGE_SIZE, MAX_LENGTH // PAGE_SIZE)
    seeded: dict[str, Any] = {"flags": SlotFlag.IGNORE_EOS, "temperature": 1.0, "seed_low": 3}
    alone = [driver.prefill(0, [5, 6, 7], **seeded), *(token for (token,) in driver.decode(0, iterations=12))]
    flags = SlotFlag.IGNORE_EOS | SlotFlag.PENALTIES | SlotFlag.LOGPROBS
    driver.prefill(1, [9, 9, 9], flags=flags, frequency=1.5, repetition=1.2, prompt_length=3)
    first = driver.prefill(2, [5, 6, 7], **seeded)
    assert [first, *(tokens[0] for tokens in driver.decode(2, 1, iterations=12))] == alone
