"""Cases in which the engine plays given tokens: what matters is what the services make of them."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import tiny
from tests.e2e.stack import Stack
from tests.processes import eventually

ENDLESS = 900
TEXTS = {  # by seed
    1: "ABCDEFGHIJK",
    2: " worldwide",
    3: "a😀é世",
    4: "one.\n\nAnother",
    5: "a b c d",
}


@pytest.fixture(scope="module")
def tokenizer(weightless_model: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(weightless_model)


@pytest.fixture(scope="module", params=[1, 3], ids=["one token a step", "three tokens a step"])
def stack(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, weightless_model: Path, tokenizer: PreTrainedTokenizerFast
) -> Iterator[Stack]:
    plays: dict[int, dict[str, Any]] = {seed: {"ids": bytes_of(tokenizer, text)} for seed, text in TEXTS.items()}
    plays[ENDLESS] = {"ids": [40, 41, 42], "repeat": True}  # 250 tokens take 2.5 s
    script = {"step_s": 0.01 * request.param, "tokens_per_step": request.param, "by_seed": plays}
    with Stack(tmp_path_factory.mktemp("stack"), model=weightless_model, engine="scripted", script=script) as running:
        yield running


def bytes_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """One token a byte: more pieces than the tokenizer itself would make."""
    alphabet = {piece: id_ for piece, id_ in tokenizer.get_vocab().items() if len(piece) == 1}
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [alphabet[character] for piece, _ in pieces for character in piece]


def both(stack: Stack, seed: int, **parameters: Any) -> tuple[str, str]:
    """Text and finish reason, which the stream and the whole answer must agree on; no delta holds half a character."""
    request: dict[str, Any] = {"model": "tiny", "prompt": "hi", "seed": seed, "max_tokens": 100, **parameters}
    whole = stack.openai.completions.create(**request)
    chunks = list(stack.openai.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    return whole.choices[0].text, reasons[0]


def test_tok_01_characters_over_several_tokens(stack: Stack) -> None:
    assert both(stack, 3) == (TEXTS[3], "stop")


@pytest.mark.parametrize(
    "seed, stop, text",
    [
        (1, "DEFGHIJ", "ABC"),
        (2, "world", " "),
        (3, "é", "a😀"),
        (4, "\n\n", "one."),
        (4, ["\n\nA", "ther"], "one."),
    ],
)
def test_stp_01_stp_03_nothing_of_a_stop_string_leaks(stack: Stack, seed: int, stop: Any, text: str) -> None:
    assert both(stack, seed, stop=stop) == (text, "stop")


def test_stp_03_a_stop_string_that_never_comes_holds_nothing_back(stack: Stack) -> None:
    assert both(stack, 1, stop="DEFX") == (TEXTS[1], "stop")


def test_stp_04_the_earliest_stop_in_the_text_wins(stack: Stack) -> None:
    assert both(stack, 5, stop=["d", "b"]) == ("a ", "stop")


def test_stp_06_finish_reasons_at_the_edge(stack: Stack) -> None:
    length = len(TEXTS[1])
    assert both(stack, 1, max_tokens=length) == (TEXTS[1], "length")
    assert both(stack, 1, max_tokens=length + 1) == (TEXTS[1], "stop")  # EOS is token number max_tokens
    assert both(stack, 1, max_tokens=3, stop="C") == ("AB", "stop")


def test_str_12_no_text_at_all(stack: Stack) -> None:
    assert both(stack, 12345) == ("", "stop")
    assert both(stack, 1, max_tokens=1) == ("A", "length")


def test_tok_07_bad_ids_do_not_reach_the_worker(stack: Stack, tokenizer: Any) -> None:
    padding = tiny.VOCAB_SIZE - 1  # which the embedding has and the tokenizer has not
    assert padding >= len(tokenizer)
    with stack.stream("hi", seed=ENDLESS, max_tokens=100, extra_body={"ignore_eos": True}) as stream:
        text = next(stream)
        for prompt in ([-1], [384], [0, 384], [2**32], [[1], [384]], [padding]):
            with pytest.raises(openai.BadRequestError, match="token id") as error:
                stack.openai.completions.create(model="tiny", prompt=prompt)
            assert error.value.param == "prompt"
        text += "".join(stream)
    assert len(text) == 100  # the one beside them went on
    assert both(stack, 1) == (TEXTS[1], "stop")
    assert not stack.worker.ended


@pytest.mark.parametrize(
    "parameters, param",
    [
        ({"max_tokens": -5}, "max_tokens"),
        ({"extra_body": {"max_tokens": 1e30}}, "max_tokens"),
        ({"max_tokens": 2**63}, None),
        ({"max_tokens": 10**12}, None),
        ({"seed": 2**70}, "seed"),
        ({"n": 10**9}, "n"),
        ({"extra_body": {"top_k": 2**40}}, "top_k"),
        ({"logit_bias": {"1": 1e308}}, "logit_bias"),
    ],
)
def test_err_10_big_numbers_are_refused(stack: Stack, parameters: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        stack.openai.completions.create(model="tiny", prompt="hi", **parameters)
    assert param is None or error.value.param == param
    if parameters.get("max_tokens", 0) >= 10**12:
        assert error.value.code == "context_length_exceeded"


def at_rest(stack: Stack) -> bool:
    values = stack.scheduler.metrics()
    counts = ("num_requests_running", "num_requests_waiting", "scheduler_outstanding_plans", "kv_cache_usage_perc")
    return not any(values[f"lockstep_{name}"] for name in counts)


def pages_in_use(stack: Stack) -> float:
    return stack.scheduler.metrics(state="owned")["lockstep_scheduler_pages"]


def test_can_01_a_client_that_leaves_a_stream(stack: Stack) -> None:
    def aborted() -> float:
        return stack.scheduler.metrics(finished_reason="abort")["lockstep_request_success_total"]

    before = aborted()
    with stack.stream("hi", seed=ENDLESS, max_tokens=250, extra_body={"ignore_eos": True}) as stream:
        for _ in range(3):
            next(stream)
        assert not at_rest(stack)
        assert pages_in_use(stack) > 0
    eventually(lambda: at_rest(stack))  # no plan is outstanding: the worker computes nothing of it any more
    assert (pages_in_use(stack), aborted()) == (0, before + 1)


async def test_can_01_a_client_that_leaves_a_whole_answer(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        work = client.completions.create(model="tiny", prompt="hi", seed=ENDLESS, max_tokens=250, extra_body={"ignore_eos": True})
        call = asyncio.create_task(work)
        await asyncio.to_thread(eventually, lambda: not at_rest(stack))
        call.cancel()
        await asyncio.to_thread(eventually, lambda: at_rest(stack))


def test_can_05_a_stop_string_ends_the_work_in_the_engine(stack: Stack) -> None:
    def computed() -> float:
        return stack.scheduler.metrics()["lockstep_generation_tokens_total"]

    before = computed()
    assert both(stack, ENDLESS, max_tokens=250, stop="GH") == ("F", "stop")  # ids 40, 41, 42 are F, G, H
    eventually(lambda: at_rest(stack))
    assert computed() - before < 2 * 80  # of two answers of 250; test_whole_chain.py, with slow steps, is stricter


async def test_can_07_aborts_race_with_the_end(stack: Stack) -> None:
    """Cancelled at every moment of a short answer: nothing is lost or freed twice, and the service lives."""
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        for moment in range(12):
            stream = await client.completions.create(model="tiny", prompt="hi", seed=1, max_tokens=12, stream=True)
            async with stream:
                chunks = aiter(stream)
                for _ in range(moment):
                    await anext(chunks, None)
    await asyncio.to_thread(eventually, lambda: at_rest(stack))
    assert both(stack, 1) == (TEXTS[1], "stop")


def test_tok_09_tokens_cost_the_same_at_the_end_of_a_long_answer(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """8000 tokens of one stream: the last thousand take at most twice the processors' time of the second."""
    model = tiny.weightless_model(tmp_path / "long", max_position_embeddings=16384)
    phrase = "a long answer, é 世 and on "
    thousand = 1000 * len(phrase) / len(phrase.encode())  # tokens, in characters
    script = {"default": {"ids": bytes_of(tokenizer, phrase), "repeat": True}}
    with Stack(tmp_path, model=model, engine="scripted", script=script, worker_args=["--num-pages", "2000"]) as stack:
        processes = [*(psutil.Process(service.pid) for service in (stack.gateway, stack.scheduler, stack.worker)), *stack.ranks()]

        def spent() -> float:
            return sum(sum(process.cpu_times()[:2]) for process in processes)

        marks, characters = [spent()], 0
        with stack.openai.completions.create(
            model="long", prompt=[5] * 4000, max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            for chunk in stream:
                characters += len(chunk.choices[0].text)
                while characters >= len(marks) * thousand - len(phrase):  # the end may be in the middle of a character
                    marks.append(spent())
    print([round(after - before, 2) for before, after in pairwise(marks)])
    assert len(marks) == 9
    assert marks[8] - marks[7] < 2 * (marks[2] - marks[1])
