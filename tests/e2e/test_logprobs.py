"""Log-probabilities, penalties and biases over HTTP, through real processes, against transformers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.stack import Stack

TOLERANCE = 1e-3
PROMPTS = 50


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    """Chunks of prompts, and pages of which several make a prefix."""
    worker_args = ["--max-step-tokens", "64", "--page-size", "4", "--max-num-seqs", "8", "--num-pages", "300", "--threads", "1"]
    with Stack(tmp_path_factory.mktemp("stack"), model=tiny_model, worker_args=worker_args) as stack:
        yield stack


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of many lengths; every second goes on from the one before."""
    random = np.random.default_rng(0)
    made: list[list[int]] = []
    for number in range(PROMPTS):
        before = made[-1] if number % 2 else []
        made.append(before + random.integers(3, 300, random.integers(1, 90)).tolist())
    return made


def completions(stack: Stack, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first choice of each, asked for side by side."""

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        response = stack.client.post("/v1/completions", json={"model": stack.names[0], **body})
        assert response.is_success, response.text
        answer: dict[str, Any] = response.json()
        return {**answer["choices"][0], "usage": answer["usage"]}

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, bodies))


def expected(reference: Any, ids: list[int]) -> list[float]:
    """Of every id but the first."""
    with torch.inference_mode():
        values = torch.log_softmax(reference(torch.tensor([ids])).logits[0, :-1].double(), dim=-1)
    chosen: list[float] = values[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()
    return chosen


def test_lpb_03_echo_scores_equal_transformers_cold_and_warm(stack: Stack, reference: Any, prompts: list[list[int]]) -> None:
    theirs = [expected(reference, prompt) for prompt in prompts]
    scoring = [{"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1} for prompt in prompts]
    generating = [{"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 0} for prompt in prompts]
    completions(stack, generating)  # fills the cache
    for round_ in range(2):
        for choice, prompt, values in zip(completions(stack, scoring), prompts, theirs, strict=True):
            ours = choice["logprobs"]["token_logprobs"]
            assert ours[0] is None
            np.testing.assert_allclose(ours[1:], values, rtol=0, atol=TOLERANCE)
            assert (choice["finish_reason"], choice["usage"]["completion_tokens"]) == ("length", 0)
            assert (choice["usage"]["prompt_tokens"], choice["usage"]["prompt_tokens_details"]["cached_tokens"]) == (len(prompt), 0)
        if not round_:
            warm = completions(stack, generating)
            assert sum(choice["usage"]["prompt_tokens_details"]["cached_tokens"] for choice in warm) > 1000


def test_logprobs_of_the_completion_do_not_depend_on_the_cache(stack: Stack, reference: Any, prompts: list[list[int]]) -> None:
    bodies = [{"prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "logprobs": 5} for prompt in prompts[::3]]
    asked = [{**body, "cache_salt": "cold"} for body in bodies]
    for cold, warm in zip(completions(stack, asked), completions(stack, asked), strict=True):
        assert warm["text"] == cold["text"]
        assert warm["logprobs"]["tokens"] == cold["logprobs"]["tokens"]
        np.testing.assert_allclose(warm["logprobs"]["token_logprobs"], cold["logprobs"]["token_logprobs"], rtol=0, atol=1e-4)
        assert all(
            value == max(top.values())
            for value, top in zip(warm["logprobs"]["token_logprobs"], warm["logprobs"]["top_logprobs"], strict=True)
        )
    echoed = completions(stack, [{**body, "echo": True} for body in bodies[:5]])
    for choice, prompt, alone in zip(echoed, prompts[::3], completions(stack, bodies[:5]), strict=False):
        ours = choice["logprobs"]["token_logprobs"]
        np.testing.assert_allclose(ours[1 : len(prompt)], expected(reference, prompt), rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(ours[len(prompt) :], alone["logprobs"]["token_logprobs"], rtol=0, atol=1e-4)


def test_lpb_01_as_many_alternatives_as_asked_for_the_likeliest_first(stack: Stack) -> None:
    body: dict[str, Any] = {"model": stack.names[0], "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "ignore_eos": True}
    for top in (0, 3, 20):
        asked = {**body, "temperature": 0, "logprobs": True, "top_logprobs": top}
        answer = stack.client.post("/v1/chat/completions", json=asked).raise_for_status().json()
        entries = answer["choices"][0]["logprobs"]["content"]
        assert len(entries) == answer["usage"]["completion_tokens"] == 6
        for entry in entries:
            values = [each["logprob"] for each in entry["top_logprobs"]]
            assert len(values) == top
            assert values == sorted(values, reverse=True)
            assert not top or entry["logprob"] == values[0]
            assert entry["logprob"] < 0
    for fields in ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}, {"logit_bias": {"384": 1}}, {"logit_bias": {"x": 1}}):
        assert stack.client.post("/v1/chat/completions", json={**body, **fields}).status_code == 400
    assert stack.client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"] is None


def test_smp_07_a_bias_makes_an_id_certain_or_forbids_it(stack: Stack, reference: Any) -> None:
    with torch.inference_mode():
        likeliest = int(reference(torch.tensor([[5, 6, 7]])).logits[0, -1].argmax())
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    biases: list[dict[str, int]] = [{"65": 100}, {}, {str(likeliest): -100}]
    plain, forced, none, forbidden = completions(stack, [body, *({**body, "logit_bias": bias} for bias in biases)])
    assert len(set(forced["logprobs"]["tokens"])) == 1
    assert none["text"] == plain["text"]
    first = plain["logprobs"]["tokens"][0]
    assert first != forced["logprobs"]["tokens"][0]
    assert first not in forbidden["logprobs"]["tokens"]
    assert max(forced["logprobs"]["token_logprobs"]) < -1  # the bias does not show


def test_penalties_change_what_repeats(stack: Stack) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 60, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    ways: list[dict[str, Any]] = [
        {},
        {"presence_penalty": 2},
        {"frequency_penalty": 2},
        {"repetition_penalty": 2.0},
        {"frequency_penalty": -2},
    ]
    distinct = [len(set(choice["logprobs"]["tokens"])) for choice in completions(stack, [{**body, **way} for way in ways])]
    assert distinct[4] <= distinct[0] < max(distinct[1:4])
    again = completions(stack, [{**body, **way} for way in ways])
    assert [len(set(choice["logprobs"]["tokens"])) for choice in again] == distinct  # from the cache, too
