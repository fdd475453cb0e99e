"""What clients may send and what comes back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from pydantic import ValidationError
from tokenizers import processors

from services.gateway.model import SamplingDefaults, cache_folder
from shared.protocol.plan import ids_from_bytes
from tests.services.gateway.conftest import EOS, Stack, assert_error, events
from tests.services.gateway.scripted_scheduler import Script
from tests.tiny import tiny_tokenizer

HI = [{"role": "user", "content": "hi"}]


async def test_api_01_unknown_keys_are_ignored(stack: Stack) -> None:
    stack.says("hello")
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    for content in ("hi", [part]):
        message = {"role": "user", "content": content, "id": 7, "opts": {"a": 1}, "name": "a b"}
        response = await stack.chat(foo=1, messages=[message], rid="1", request_id="2", priority=3, tenant="t", temperature=0)
        assert response.json()["choices"] == (await stack.chat(temperature=0)).json()["choices"]
        first, second = stack.scheduler.submits[-2:]
        assert first.prompt_ids == second.prompt_ids
        assert not first.HasField("priority")
        assert not first.HasField("tenant")
    options = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False, "x": 1}}
    assert (await stack.chat(**options)).status_code == 200


async def test_api_03_one_json_object(stack: Stack) -> None:
    stack.says("hello", cached_tokens=3)
    for fields in ({}, {"stream": False}):
        response = await stack.chat(**fields)
        assert response.headers["content-type"] == "application/json"
        body = response.json()
        assert body.keys() == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
        assert (body["object"], body["model"], type(body["created"])) == ("chat.completion", "tiny", int)
        assert body["id"].startswith("chatcmpl-")
        message = {"role": "assistant", "content": "hello", "refusal": None}
        assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
        prompt, completion = len(stack.scheduler.prompts[0]), len(stack.encode("hello")) + 1
        assert body["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


async def test_cached_tokens_are_told_also_when_a_stop_string_ends_the_answer(stack: Stack) -> None:
    stack.says("hello, world", cached_tokens=3)
    for fields in ({}, {"stop": "ello"}, {"max_tokens": 2}):
        assert (await stack.chat(**fields)).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_api_04_max_completion_tokens(stack: Stack) -> None:
    stack.plays(*([5] for _ in range(100)))
    for fields in ({"max_completion_tokens": 3}, {"max_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        body = (await stack.chat(**fields)).json()
        assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (3, "length")
        body = (await stack.complete(**fields)).json()
        assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (3, "length")
    for ask in (stack.chat, stack.complete):
        assert_error(await ask(max_tokens=3, max_completion_tokens=4), 400, "max_tokens", "invalid_parameter_combination")


async def test_api_06_the_name_asked_for(stack: Stack) -> None:
    stack.says("x")
    answers = [await stack.http.get(path) for path in ("/v1/models", "/v1/models/tiny", "/tokenizer_info", "/version", "/openapi.json")]
    for name in ("tiny", "org/tiny"):
        answers += [await stack.chat(model=name), await stack.complete(model=name)]
        assert [answer.json()["model"] for answer in answers[-2:]] == [name, name]
        answers += [await stack.chat(model=name, stream=True), await stack.complete(model=name, stream=True)]
        assert {chunk["model"] for answer in answers[-2:] for chunk in events(answer.content)} == {name}
    for ask in (stack.chat, stack.complete):
        for stream in (False, True):
            answers.append(await ask(model="nope", stream=stream))
            assert_error(answers[-1], 404, None, "model_not_found")
            for nothing in (None, ""):
                answers.append(await ask(model=nothing, stream=stream))
                assert_error(answers[-1], 400, None, None)
    answers.append(await stack.http.post("/v1/completions", json={"prompt": "hi"}))
    assert_error(answers[-1], 400, None, None)
    paths = (stack.folder, cache_folder(), Path.home(), Path(__file__).parents[3])
    assert not [answer.url for answer in answers for path in paths if str(path) in answer.text]


async def test_api_07_models(stack: Stack) -> None:
    listed = (await stack.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["tiny", "org/tiny"]
    for path in ("org/tiny", "org%2Ftiny"):
        card = (await stack.http.get(f"/v1/models/{path}")).json()
        assert (card["id"], card["object"], type(card["created"]), type(card["owned_by"])) == ("org/tiny", "model", int, str)
        assert card in listed["data"]
    for path in ("nope", "org/nope", "org", "tiny/"):
        assert_error(await stack.http.get(f"/v1/models/{path}"), 404, None, "model_not_found")


async def test_api_12_fields_without_effect(stack: Stack) -> None:
    stack.says("x")
    taken = {
        "user": "u",
        "store": True,
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "reasoning_effort": "low",
        "verbosity": "low",
        "parallel_tool_calls": True,
    }
    neutral = {
        "n": 1,
        "logprobs": False,
        "top_logprobs": 0,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "functions": [],
        "stop": [],
        "repetition_penalty": 1,
    }
    nulls = dict.fromkeys((*taken, *neutral, "tools", "max_tokens", "seed", "temperature", "stream", "stream_options", "top_k"))
    for fields in (taken, neutral, nulls):
        assert (await stack.chat(**fields)).status_code == 200, fields
    legacy = {"best_of": 1, "suffix": "", "echo": False, "n": 1}
    for fields in (legacy, dict.fromkeys((*legacy, "logprobs", "max_tokens"))):
        assert (await stack.complete(**fields)).status_code == 200, fields


async def test_api_13_legacy(stack: Stack) -> None:
    stack.plays(*([5] for _ in range(100)))
    whole = (await stack.complete()).json()
    chunks = events((await stack.complete(stream=True)).content)
    assert (whole["usage"]["completion_tokens"], whole["choices"][0]["finish_reason"]) == (16, "length")
    assert whole["choices"][0].keys() == {"index", "text", "logprobs", "finish_reason"}
    for each in (whole, *chunks):
        assert each["object"] == "text_completion"
        assert each["id"].startswith("cmpl-")
        assert all(choice.keys() == {"index", "text", "logprobs", "finish_reason"} for choice in each["choices"])
    for fields, param in (({"best_of": 1, "n": 2}, "best_of"), ({"best_of": 2, "stream": True}, "best_of"), ({"suffix": "x"}, "suffix")):
        assert_error(await stack.complete(**fields), 400, param)


async def test_legacy_prompts(stack: Stack) -> None:
    stack.says("x")
    hi, bye = stack.encode("hi"), stack.encode("good bye")
    for prompt, expected in (("hi", [hi]), (["hi", "good bye"], [hi, bye]), ([5, 6], [[5, 6]]), ([[5, 6], [7]], [[5, 6], [7]])):
        stack.scheduler.submits.clear()
        body = (await stack.complete(prompt=prompt)).json()
        assert stack.scheduler.prompts == expected
        assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
        assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_tok_05_prompts_of_ids_get_no_bos_and_texts_one(start: Any, tmp_path: Path) -> None:
    fast = tiny_tokenizer(tmp_path / "bos")
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    fast.save_pretrained(tmp_path / "bos")
    stack = await start({"folder": tmp_path / "bos"})
    stack.says("x")
    for prompt, expected in (("hi", [0, *stack.encode("hi")]), ([5, 6], [5, 6])):
        assert (await stack.complete(prompt=prompt)).json()["usage"]["prompt_tokens"] == len(expected)
        assert stack.scheduler.prompts[-1] == expected
    await stack.chat()
    assert 0 not in stack.scheduler.prompts[-1]  # its template writes none


async def test_several_prompts_in_one_stream(stack: Stack) -> None:
    texts = ["hello", "good bye"]

    def script(submit: Any) -> Script:
        text = texts[ids_from_bytes(submit.prompt_ids)[0] - 5]
        return Script([*([each] for each in stack.encode(text)), [EOS]], step_s=0.005)

    stack.scheduler.script = script
    body = {"prompt": [[5], [6]], "stream_options": {"include_usage": True}}
    chunks = events((await stack.complete(stream=True, **body)).content)
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for index, text in enumerate(texts):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
    assert chunks[-1]["usage"] == (await stack.complete(prompt=[[5], [6]])).json()["usage"]


async def test_max_tokens_0_asks_for_nothing(stack: Stack) -> None:
    for stream in (False, True):
        response = await stack.complete(max_tokens=0, stream=stream)
        choice = (events(response.content)[0] if stream else response.json())["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert (await stack.complete(prompt=[5] * stack.scheduler.max_length, max_tokens=0)).status_code == 200
    assert not stack.scheduler.submits


async def test_smp_01_zero_is_a_value(stack: Stack) -> None:
    stack.says("x")
    await stack.chat(temperature=0, top_p=0, seed=0, top_k=0, min_p=0, min_tokens=0)
    sampling = stack.scheduler.submits[0].sampling
    for field in ("temperature", "top_p", "seed"):
        assert sampling.HasField(field)
        assert getattr(sampling, field) == 0


async def test_sampling_reaches_the_scheduler(stack: Stack) -> None:
    stack.says("x")
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "seed": -(2**63),
        "min_tokens": 2,
        "max_tokens": 9,
    }
    fields |= {"presence_penalty": 0.5, "frequency_penalty": -2, "repetition_penalty": 1.5, "logit_bias": {"65": 100, "7": -0.5}}
    await stack.chat(**fields, ignore_eos=True, stop_token_ids=[7, 8])
    await stack.chat()
    await stack.chat()
    given, plain, other = stack.scheduler.submits
    assert [getattr(given.sampling, field) for field in ("temperature", "top_p", "top_k", "min_p", "seed")] == [
        0.5,
        0.25,
        7,
        0.125,
        -(2**63),
    ]
    assert (given.max_tokens, given.min_tokens, given.ignore_eos) == (9, 2, True)
    penalties = (given.sampling.presence_penalty, given.sampling.frequency_penalty, given.sampling.repetition_penalty)
    assert penalties == (0.5, -2, 1.5)
    assert ids_from_bytes(given.sampling.bias_ids).tolist() == [65, 7]
    assert np.frombuffer(given.sampling.bias_values, "<f4").tolist() == [100, -0.5]
    assert not plain.sampling.bias_ids
    assert ids_from_bytes(given.stop_token_ids).tolist() == [7, 8]
    assert (plain.sampling.temperature, plain.sampling.top_p, plain.sampling.HasField("top_k")) == (1, 1, False)
    assert plain.sampling.seed != other.sampling.seed
    assert 0 < plain.deadline_ms <= 600_000


@pytest.mark.parametrize("temperature", [1e-2, 1e-4, 1e-8, 1e-30, 1e-300])
async def test_smp_04_small_temperatures(stack: Stack, temperature: float) -> None:
    stack.says("x")
    assert (await stack.chat(temperature=temperature)).status_code == 200


async def test_stp_07_default_length(stack: Stack) -> None:
    stack.plays(*([5] for _ in range(300)))
    usage = (await stack.chat()).json()
    assert usage["choices"][0]["finish_reason"] == "length"
    assert usage["usage"]["total_tokens"] == stack.scheduler.max_length


async def test_tpl_01_content_as_parts(stack: Stack) -> None:
    stack.says("x")
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    for role in ("system", "user", "assistant", "developer", "tool"):
        for content in (parts, "one two"):
            assert (await stack.chat(messages=[{"role": role, "content": content, "tool_call_id": "c"}])).status_code == 200
    prompts = stack.scheduler.prompts
    assert len(prompts) == 10
    assert prompts[::2] == prompts[1::2]


async def test_a_message_without_content_is_empty(stack: Stack) -> None:
    stack.says("x")
    for message in ({"role": "user"}, {"role": "user", "content": None}, {"role": "user", "content": ""}):
        assert (await stack.chat(messages=[message])).status_code == 200
    prompts = stack.scheduler.prompts
    assert prompts[0] == prompts[1] == prompts[2]


async def test_request_ids(stack: Stack) -> None:
    stack.says("x")
    response = await stack.http.get("/v1/models", headers={"x-request-id": "a-1.b"})
    assert response.headers["x-request-id"] == "a-1.b"
    for bad in (b"", b"a b", b"x" * 129, b"\xed\xa0\x80"):
        response = await stack.http.get("/v1/models", headers={b"x-request-id": bad})
        assert len(response.headers["x-request-id"]) == 32
    for stream in (False, True):
        response = await stack.http.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": HI, "stream": stream}, headers={"x-request-id": "mine"}
        )
        assert response.headers["x-request-id"] == "mine"
    assert {submit.request_id for submit in stack.scheduler.submits} == {"mine"}


async def test_health_and_version(stack: Stack) -> None:
    assert (await stack.http.get("/health")).json() == {"status": "ok"}
    assert (await stack.http.get("/version")).json()["version"]


async def test_the_official_client(stack: Stack) -> None:
    stack.says("hello, world")
    async with openai.AsyncOpenAI(base_url=f"{stack.http.base_url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        assert whole.choices[0].message.content == "hello, world"
        async with client.chat.completions.stream(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream_options={"include_usage": True}
        ) as stream:
            final = await stream.get_final_completion()
        assert (final.choices[0].message.content, final.choices[0].message.role) == ("hello, world", "assistant")
        assert final.usage == whole.usage
        legacy = await client.completions.create(model="tiny", prompt="hi", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in legacy]) == "hello, world"
        assert [model.id async for model in client.models.list()] == ["tiny", "org/tiny"]


async def test_sec_08_logs_hold_no_text(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    stack.says("hello, world")
    forged = "tiny\n2030-01-01 forged"
    with caplog.at_level("DEBUG", "services.gateway"):
        response = await stack.chat(messages=[{"role": "user", "content": "what is the capital"}], user=forged)
        await stack.chat(model=forged)
        await stack.http.post("/v1/nope%0Aforged")
    lines = [record.getMessage() for record in caplog.records]
    assert not any("\n" in line or "capital" in line or "hello" in line for line in lines)
    assert response.headers["x-request-id"]  # which every line has as a field: tests/e2e
    assert any("tokens of tiny" in line for line in lines)


async def test_api_09_n_choices(stack: Stack) -> None:
    stack.says("hello", cached_tokens=3)
    for ask in (stack.chat, stack.complete):
        whole = (await ask(n=3, seed=5)).json()
        single = len(stack.scheduler.prompts[-1])
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        completion = 3 * (len(stack.encode("hello")) + 1)
        usage = whole["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (single, completion)
        assert usage["prompt_tokens_details"]["cached_tokens"] <= single
    assert {choice["message"]["content"] for choice in (await stack.chat(n=3, temperature=0)).json()["choices"]} == {"hello"}
    stack.scheduler.submits.clear()
    messages = stack.scheduler.messages
    await stack.complete(prompt=[[5], [6]], n=2)
    assert stack.scheduler.prompts == [[5], [5], [6], [6]]
    assert stack.scheduler.messages == messages + 1  # so that they can enter one step


async def test_smp_03_seeds_of_choices_differ_and_come_again(stack: Stack) -> None:
    stack.says("x")
    for fields in ({"n": 4, "seed": 3}, {"n": 4, "seed": 3}, {"n": 1, "seed": 3}, {"n": 2, "seed": 4}, {"n": 2}, {"n": 2}):
        await stack.chat(**fields)
    seeds = [submit.sampling.seed for submit in stack.scheduler.submits]
    first, second, alone, other = seeds[:4], seeds[4:8], seeds[8], seeds[9:11]
    assert len(set(first)) == 4
    assert first == second
    assert (first[0], alone, other[0]) == (3, 3, 4)
    assert other[1] not in first
    assert len(set(seeds[11:])) == 4


async def test_smp_09_the_models_own_sampling_is_a_matter_of_a_setting(
    start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_tokenizer(tmp_path / "model")
    suggested = {"temperature": 0.6, "top_k": 1, "repetition_penalty": 1.2, "max_new_tokens": 5, "do_sample": True}
    (tmp_path / "model/generation_config.json").write_text(json.dumps(suggested))
    for setting, expected in (("ignore", (1.0, 0, 1.0)), ("apply", (0.6, 1, 1.2))):
        with caplog.at_level("INFO", "services.gateway"):
            stack = await start({"folder": tmp_path / "model", "fingerprint": setting}, generation_config=setting)
        told = next(record.getMessage() for record in caplog.records if "temperature=0.6" in record.getMessage())
        assert ("not applied" in told) == (setting == "ignore")
        caplog.clear()
        stack.says("x")
        for fields in ({}, {"temperature": None}, {"temperature": 0, "top_k": -1, "repetition_penalty": 1}):
            await stack.chat(**fields)
        *plain, explicit = [submit.sampling for submit in stack.scheduler.submits]
        for sampling in plain:
            assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == pytest.approx(expected)
        assert (explicit.temperature, explicit.HasField("top_k"), explicit.repetition_penalty) == (0, False, 1)
        assert stack.scheduler.submits[0].max_tokens > 5


def test_smp_09_a_model_may_switch_top_k_off_as_a_request_may() -> None:
    assert SamplingDefaults.model_validate({"top_k": -1, "do_sample": True}).model_dump(exclude_none=True) == {"top_k": -1}
    with pytest.raises(ValidationError):
        SamplingDefaults.model_validate({"top_k": -2})


async def test_cache_salt_reaches_the_scheduler(stack: Stack) -> None:
    stack.says("x")
    await stack.chat(cache_salt="mine")
    await stack.chat()
    assert [(submit.HasField("cache_salt"), submit.cache_salt) for submit in stack.scheduler.submits] == [(True, "mine"), (False, "")]
