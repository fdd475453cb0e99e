"""The official `openai` client, as it is: a stream joined equals the whole answer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.stack import Stack

EOS = 2


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), model=tiny_model, served_model_names=("tiny", "org/tiny")) as running:
        yield running


CASES: dict[str, dict[str, Any]] = {
    "length": {"temperature": 0, "max_tokens": 12},
    "seeded": {"temperature": 1.0, "seed": 7, "max_tokens": 40},
    "filtered": {"temperature": 0.8, "top_p": 0.7, "seed": 11, "max_tokens": 40, "extra_body": {"top_k": 20, "min_p": 0.02}},
    "context": {"temperature": 1.0, "seed": 3, "extra_body": {"ignore_eos": True}},
}


def counts(usage: Any) -> tuple[int, int, int]:
    """Without the tokens that were cached: the second answer to a prompt finds those of the first."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


@pytest.mark.parametrize("name", CASES)
def test_str_02_chat_streamed_equals_whole(stack: Stack, name: str) -> None:
    request: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **CASES[name]}
    whole = stack.openai.chat.completions.create(**request)
    chunks = list(stack.openai.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert counts(chunks[-1].usage) == counts(whole.usage)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    if name == "context":
        assert (whole.usage.total_tokens, whole.choices[0].finish_reason) == (256, "length")


@pytest.mark.parametrize("name", ["length", "seeded", "filtered"])
def test_str_02_completion_streamed_equals_whole(stack: Stack, name: str) -> None:
    request: dict[str, Any] = {"model": "org/tiny", "prompt": "Once upon", **CASES[name]}
    whole = stack.openai.completions.create(**request)
    chunks = list(stack.openai.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert counts(chunks[-1].usage) == counts(whole.usage)
    assert {chunk.model for chunk in chunks} == {"org/tiny"}


def test_the_typed_stream_helper_works(stack: Stack) -> None:
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    with stack.openai.chat.completions.stream(model="tiny", messages=messages, temperature=0, max_tokens=12) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text
    assert final.choices[0].message.role == "assistant"


def test_models(stack: Stack) -> None:
    assert [model.id for model in stack.openai.models.list()] == ["tiny", "org/tiny"]
    assert stack.openai.models.retrieve("org/tiny").id == "org/tiny"


def test_sampling_depends_on_the_seed(stack: Stack) -> None:
    def answer(seed: int) -> str:
        return stack.complete("Once upon", temperature=1.0, seed=seed, max_tokens=20)

    assert answer(1) == answer(1)
    assert len({answer(seed) for seed in range(4)}) > 1


def test_smp_01_temperature_zero_is_greedy(stack: Stack) -> None:
    greedy = {stack.complete("Once upon", temperature=0, seed=seed, max_tokens=20) for seed in range(5)}
    assert len(greedy) == 1
    assert stack.complete("Once upon", temperature=1, top_p=0, seed=1, max_tokens=20) in greedy


@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-30])
def test_smp_04_a_very_small_temperature_is_greedy(stack: Stack, temperature: float) -> None:
    greedy = stack.complete("Once upon", temperature=0, max_tokens=20)
    answer = stack.openai.completions.create(
        model="tiny", prompt="Once upon", temperature=temperature, seed=1, max_tokens=20, logprobs=2
    ).choices[0]
    assert answer.text == greedy
    assert answer.logprobs is not None
    values = answer.logprobs.token_logprobs or []
    assert len(values) > 0
    assert all(value is not None and -100 < value <= 0 for value in values)  # -9999 would stand for infinity


def test_smp_03_choices_of_a_seed_differ_and_come_again(stack: Stack) -> None:
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    request: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 1.0, "n": 4, "seed": 3, "max_tokens": 12}
    first, second = ([choice.message.content for choice in stack.openai.chat.completions.create(**request).choices] for _ in range(2))
    assert first == second
    assert len({*first}) > 1


def test_api_13_legacy_defaults(stack: Stack) -> None:
    whole = stack.openai.completions.create(model="tiny", prompt="Once upon", extra_body={"ignore_eos": True})
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (16, "length")
    chunks = list(stack.openai.completions.create(model="tiny", prompt="Once upon", stream=True))
    assert {each.object for each in (whole, *chunks)} == {"text_completion"}
    assert all(each.id.startswith("cmpl-") for each in (whole, *chunks))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"suffix": "x"}, "suffix"),
    ]
    for arguments, param in refused:
        with pytest.raises(openai.BadRequestError) as error:
            stack.openai.completions.create(model="tiny", prompt="hi", **arguments)
        assert error.value.param == param
