"""Log-probabilities as each endpoint writes them; what they are worth is the worker's matter (tests/services/worker/engine)."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer, decoders, models

from services.gateway.choice import ScoredToken
from services.gateway.openai.logprobs import LegacyLogprobs, chat_logprobs
from services.gateway.scores import Score
from services.gateway.text.token_texts import TokenTexts
from services.gateway.text.tokenizer import TextTokenizer
from shared.protocol.generation_pb2 import Submit
from tests.services.gateway.conftest import EOS, Stack, assert_error, events
from tests.services.gateway.scripted_scheduler import Script
from tests.services.gateway.test_detokenizer import byte_ids


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> TextTokenizer:
    return TextTokenizer(tokenizer_folder, max_length=256)


async def test_lpb_01_chat_shape(stack: Stack) -> None:
    ids = stack.says("hello, world")
    for top in (None, 0, 3):
        fields = {"logprobs": True, **({} if top is None else {"top_logprobs": top})}
        choice = (await stack.chat(**fields)).json()["choices"][0]
        assert choice["logprobs"].keys() == {"content", "refusal"}
        entries = choice["logprobs"]["content"]
        assert len(entries) == len(ids)  # EOS is left out
        for entry in entries:
            assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
            assert [each["logprob"] for each in entry["top_logprobs"]] == [-1.0, -2.0, -3.0][: top or 0]
            assert all(each.keys() == {"token", "logprob", "bytes"} for each in entry["top_logprobs"])
            assert not top or entry["top_logprobs"][0]["token"] == entry["token"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "hello, world"
    assert (await stack.chat()).json()["choices"][0]["logprobs"] is None
    assert not stack.scheduler.submits[-1].HasField("logprobs")
    assert [submit.logprobs for submit in stack.scheduler.submits[:3]] == [0, 0, 3]


@pytest.mark.parametrize("fields", [{}, {"stop": "wor"}, {"max_tokens": 2}, {"n": 2}, {"stop": "ZZ"}])
@pytest.mark.parametrize("tokens_a_step", [1, 3])
async def test_streamed_logprobs_are_those_of_the_whole(stack: Stack, fields: dict[str, Any], tokens_a_step: int) -> None:
    stack.says("hello, world é😀 ends", tokens_a_step=tokens_a_step)
    asked = {"logprobs": True, "top_logprobs": 2, **fields}
    whole = (await stack.chat(**asked)).json()["choices"]
    chunks = [choice for chunk in await stack.chat_events(**asked) for choice in chunk["choices"]]
    for choice in whole:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert [entry for chunk in own if chunk["logprobs"] for entry in chunk["logprobs"]["content"]] == choice["logprobs"]["content"]
    legacy = {"logprobs": 2, **fields}
    whole = (await stack.complete(**legacy)).json()["choices"]
    chunks = [choice for chunk in events((await stack.complete(stream=True, **legacy)).content) for choice in chunk["choices"]]
    for choice in whole:
        own = [chunk["logprobs"] for chunk in chunks if chunk["index"] == choice["index"]]
        for key, values in choice["logprobs"].items():
            assert [value for each in own for value in each[key]] == values


async def test_lpb_03_legacy_shape(stack: Stack) -> None:
    ids = stack.says("hello, world é😀")
    for asked in (0, 2):
        choice = (await stack.complete(logprobs=asked)).json()["choices"][0]
        logprobs = choice["logprobs"]
        assert logprobs.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
        assert {len(values) for values in logprobs.values()} == {len(ids)}
        assert logprobs["token_logprobs"] == [-1.0] * len(ids)
        assert {len(top) for top in logprobs["top_logprobs"]} <= {max(asked, 1), asked + 1}
        assert "".join(logprobs["tokens"]) == choice["text"]
        ends = [offset + len(token) for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)]
        assert logprobs["text_offset"] == [0, *ends[:-1]]
    assert (await stack.complete()).json()["choices"][0]["logprobs"] is None


async def test_lpb_04_texts_and_bytes(stack: Stack, tokenizer: TextTokenizer) -> None:
    text = " 世😀"
    stack.plays(*([id_] for id_ in byte_ids(tokenizer, text.encode())), [1], [EOS])
    choice = (await stack.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert choice["message"]["content"] == text
    assert entries[0]["token"] == " "
    assert bytes(byte for entry in entries for byte in entry["bytes"] or ()).decode() == text
    assert [len(entry["bytes"]) for entry in entries[:-1]] == [1] * len(text.encode())
    assert entries[1]["token"] == "bytes:\\xe4"
    assert (entries[-1]["token"], entries[-1]["bytes"]) == ("<|im_start|>", None)
    assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in entries)


def test_lpb_04_sentencepiece_tokens() -> None:
    pieces = ["<unk>", "▁Hello", "▁world", "<0xE4>"]
    tokenizer = Tokenizer(models.BPE({piece: id_ for id_, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    texts = TokenTexts(tokenizer, {})
    assert [texts[id_].text for id_ in (1, 2, 3, 99)] == [" Hello", " world", "bytes:\\xe4", ""]
    assert [texts[id_].data for id_ in (1, 3, 99)] == [b" Hello", b"\xe4", None]


async def test_infinity_is_no_json(stack: Stack) -> None:
    stack.plays([EOS], stack.encode("a"), [EOS])
    choice = (await stack.complete(logprobs=0, ignore_eos=True, max_tokens=2)).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [-9999.0, -1.0]


def test_nor_is_what_no_number_is() -> None:
    texts = TokenTexts(Tokenizer(models.BPE({"a": 0}, [])), {})
    for value, told in ((math.nan, -9999.0), (-math.inf, -9999.0), (math.inf, 0.0), (1e-7, 0.0)):  # the last: rounding
        tokens = [ScoredToken(0, "a", scored(value, {0: value}))]
        entry = json.loads("".join(chat_logprobs(tokens, texts)))["content"][0]
        assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (told, told)
        legacy = json.loads("".join(LegacyLogprobs(texts).of(tokens)))
        assert (legacy["token_logprobs"], legacy["top_logprobs"]) == ([told], [{"a": told}])


def scored(logprob: float, top: dict[int, float]) -> Score:
    return Score(logprob, np.array(list(top), "<i4"), np.array(list(top.values()), "<f4"))


def test_lpb_03_different_tokens_of_one_text_leave_the_lists_equally_long() -> None:
    pieces = {"<unk>": 0, "▁a": 1, "<0x20>": 2, "▁": 3}
    tokenizer = Tokenizer(models.BPE(pieces, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokens = [ScoredToken(id_, " ", scored(-1.0, {2: -1.0, 3: -1.0, 1: -2.0})) for id_ in (2, 3)]
    written = json.loads("".join(LegacyLogprobs(TokenTexts(tokenizer, {})).of(tokens)))
    assert written == {
        "tokens": [" ", " "],
        "token_logprobs": [-1.0, -1.0],
        "top_logprobs": [{" ": -1.0, " a": -2.0}] * 2,
        "text_offset": [0, 1],
    }


def test_of_likeliest_tokens_of_one_text_the_likelier_is_told() -> None:
    tokenizer = Tokenizer(models.BPE({"<unk>": 0, "▁a": 1, "<0x20>": 2, "▁": 3}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokens = [ScoredToken(1, " a", scored(-3.0, {2: -1.0, 3: -2.0}))]
    written = json.loads("".join(LegacyLogprobs(TokenTexts(tokenizer, {})).of(tokens)))
    assert written["top_logprobs"] == [{" ": -1.0, " a": -3.0}]


async def test_echo(stack: Stack) -> None:
    stack.says(" world")
    completion = len(stack.encode(" world"))
    prompts: tuple[Any, ...] = ("hello", stack.encode("hello"), ["hello", "é😀"])
    for prompt in prompts:
        for stream in (False, True):
            response = await stack.complete(prompt=prompt, echo=True, logprobs=1, stream=stream)
            chunks = events(response.content) if stream else [response.json()]
            for index, text in enumerate(["hello", "é😀"] if prompt == prompts[2] else ["hello"]):
                own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
                assert "".join(choice["text"] for choice in own) == f"{text} world"
                joined = {key: [value for choice in own for value in choice["logprobs"][key]] for key in own[0]["logprobs"]}
                assert joined["token_logprobs"] == [None] + [-1.0] * (len(stack.encode(text)) - 1 + completion)
                assert joined["top_logprobs"][0] is None
                assert "".join(joined["tokens"]) == f"{text} world"
                assert joined["text_offset"][-1] == len(f"{text} world") - len(joined["tokens"][-1])
    assert (await stack.complete(prompt="hello", echo=True, n=2)).json()["choices"][1]["text"] == "hello world"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 20])
async def test_choices_share_the_log_probabilities_of_their_prompt(stack: Stack, stream: bool, max_tokens: int) -> None:
    """The choice that brings them comes last."""
    text, others_came = " world" if max_tokens else "", asyncio.Event()

    def script(submit: Submit) -> Script:
        if len(stack.scheduler.submits) == 6 or not max_tokens:
            others_came.set()
        if not submit.HasField("prompt_logprobs"):
            return Script([stack.encode(text), [EOS]])
        return Script([stack.encode(text), [EOS]], waits_for=others_came)

    stack.scheduler.script = script
    body = {"prompt": ["hello", "é😀"], "n": 3, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "stream": stream}
    response = await stack.complete(**body)
    assert [submit.HasField("prompt_logprobs") for submit in stack.scheduler.submits] == (
        [True, False, False] if max_tokens else [True]
    ) * 2
    chunks = events(response.content) if stream else [response.json()]
    for index in range(6):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        prompt = body["prompt"][index // 3]  # type: ignore[index]
        assert "".join(choice["text"] for choice in own) == prompt + text
        values = [value for choice in own for value in choice["logprobs"]["token_logprobs"]]
        assert values == [None] + [-1.0] * (len(stack.encode(prompt) + stack.encode(text)) - 1)
        assert own[-1]["finish_reason"] == ("stop" if max_tokens else "length")


async def test_echo_alone_scores_a_prompt(stack: Stack) -> None:
    """What lm-evaluation-harness asks for."""
    ids = stack.encode("hello, world")
    for stream in (False, True):
        response = await stack.complete(prompt=[ids], echo=True, max_tokens=0, logprobs=10, temperature=0, stream=stream)
        choice = (events(response.content)[0] if stream else response.json())["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("hello, world", "length")
        assert choice["logprobs"]["token_logprobs"] == [None] + [-1.0] * (len(ids) - 1)
        assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} == {10}
    submit = stack.scheduler.submits[-1]
    assert (submit.max_tokens, submit.prompt_logprobs, submit.HasField("logprobs")) == (0, 10, True)
    stack.scheduler.submits.clear()
    assert (await stack.complete(prompt="hello", echo=True, max_tokens=0)).json()["choices"][0]["text"] == "hello"
    assert not stack.scheduler.submits


async def test_more_log_probabilities_than_an_answer_holds_are_refused(start: Any) -> None:
    stack = await start({"max_length": 4096})
    assert_error(await stack.chat(n=128, max_tokens=1000, logprobs=True, top_logprobs=20), 400, "logprobs", "invalid_value")
    assert_error(await stack.complete(prompt=[5] * 1000, n=128, echo=True, logprobs=20, max_tokens=0), 400, "logprobs", "invalid_value")
    assert not stack.scheduler.submits


async def test_best_of_gives_the_likeliest(stack: Stack) -> None:
    """EOS is worth -inf here."""
    ids = [stack.encode(each)[0] for each in "abc"]
    plays = iter([[EOS, *ids[:2]], [ids[0], EOS, ids[1]], ids[:3]] * 2)
    stack.scheduler.script = lambda submit: Script([next(plays)])
    for n, expected in ((1, ["abc"]), (2, ["abc", "ab"])):
        body = (await stack.complete(best_of=3, n=n, ignore_eos=True, max_tokens=3)).json()
        texts = [choice["text"] for choice in body["choices"]]
        assert texts == expected
        assert [choice["index"] for choice in body["choices"]] == list(range(n))
        assert body["usage"]["completion_tokens"] == 9
    seeds = {submit.sampling.seed for submit in stack.scheduler.submits[:3]}
    assert len(seeds) == 3


async def test_the_official_client_reads_logprobs(stack: Stack) -> None:
    stack.says("hello")
    async with openai.AsyncOpenAI(base_url=f"{stack.http.base_url}/v1", api_key="none") as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        whole = await client.chat.completions.create(model="tiny", messages=messages, logprobs=True, top_logprobs=2)
        async with client.chat.completions.stream(model="tiny", messages=messages, logprobs=True, top_logprobs=2) as stream:
            final = await stream.get_final_completion()
        assert whole.choices[0].logprobs is not None
        assert final.choices[0].logprobs is not None
        assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content
        legacy = await client.completions.create(model="tiny", prompt="hi", logprobs=2, echo=True)
        assert legacy.choices[0].logprobs is not None
        assert legacy.choices[0].logprobs.token_logprobs is not None
