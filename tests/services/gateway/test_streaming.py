"""Streams of server-sent events, and that they say what the answer as a whole says."""

import asyncio
import gc
import json
from typing import Any

import openai
import pytest

from services.gateway.metrics import RequestMetrics
from shared.protocol.plan import ids_from_bytes
from tests.processes import eventually_async
from tests.services.gateway.conftest import EOS, Stack, assert_error, events
from tests.services.gateway.scripted_scheduler import ERROR, LENGTH, Script


@pytest.mark.parametrize("fields, reason", [({}, "stop"), ({"stop": "world"}, "stop"), ({"max_tokens": 3}, "length")])
async def test_str_02_chunks_and_whole_answer_agree(stack: Stack, fields: dict[str, Any], reason: str) -> None:
    stack.says("hello, world")
    chunks = await stack.chat_events(seed=1, **fields)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert (chunks[0]["object"], type(chunks[0]["created"])) == ("chat.completion.chunk", int)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-1])
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert (chunks[-1]["choices"][0]["delta"], chunks[-1]["choices"][0]["finish_reason"]) == ({}, reason)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert "hello, world".startswith(await stack.content(seed=1, **fields))
    whole = (await stack.chat(seed=1, **fields)).json()
    usage = await stack.chat_events(seed=1, stream_options={"include_usage": True}, **fields)
    assert usage[-1]["usage"] == whole["usage"]


async def test_completions_stream_and_whole(stack: Stack) -> None:
    stack.says("hello, world")
    whole = (await stack.complete()).json()
    assert (whole["object"], whole["choices"][0]["text"]) == ("text_completion", "hello, world")
    chunks = events((await stack.complete(stream=True)).content)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello, world"


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_str_01_bytes_on_the_wire(stack: Stack, path: str) -> None:
    body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    stack.says("hello, world ends here")
    for fields, reason in (({}, "stop"), ({"max_tokens": 3}, "length"), ({"stop": "ends"}, "stop"), ({"n": 2}, "stop")):
        response = await stack.http.post(f"/v1/{path}", json={**body, **fields})
        raw = response.content
        assert raw.isascii()
        assert raw.count(b"[DONE]") == 1
        assert events(raw)[-1]["choices"][0]["finish_reason"] == reason


async def test_str_03_usage_when_asked_for(stack: Stack) -> None:
    stack.says("hello, world ends here", tokens_a_step=3, cached_tokens=2)
    for fields in ({}, {"stop": "ends"}, {"max_tokens": 2}):
        whole = (await stack.chat(**fields)).json()
        chunks = await stack.chat_events(stream_options={"include_usage": True}, **fields)
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
        assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    for options in ({}, {"include_usage": False}, {"include_usage": None}, None):
        chunks = await stack.chat_events(stream_options=options)
        assert all(chunk.get("usage") is None and chunk["choices"] for chunk in chunks)


async def test_str_06_keep_alives_are_comments(start: Any) -> None:
    stack = await start(keep_alive_s=0.05)
    release = asyncio.Event()
    stack.plays(release, stack.encode("hello"), [EOS])
    raw = await kept_alive(stack, release, 2)
    comments, _, data = raw.partition("data: ")
    assert len(comments.split("\n\n")) > 2
    assert set(comments.split("\n\n")) == {": keep-alive", ""}
    assert events(f"data: {data}".encode())[1]["choices"][0]["delta"] == {"content": "hello"}
    release.clear()
    asyncio.get_running_loop().call_later(0.3, release.set)
    async with openai.AsyncOpenAI(base_url=f"{stack.http.base_url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello"


async def test_a_rejection_after_a_keep_alive_is_an_event(start: Any) -> None:
    stack = await start(keep_alive_s=0.05)
    release = asyncio.Event()
    stack.plays(release, reason=ERROR)
    raw = await kept_alive(stack, release, 1)
    assert json.loads(raw.split("data: ")[1])["error"]["type"] == "server_error"


async def kept_alive(stack: Stack, release: asyncio.Event, times: int) -> str:
    """The whole of a streamed chat, in which something is released after so many keep-alives."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    raw = ""
    async with stack.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async for piece in response.aiter_text():
            raw += piece
            if raw.count(": keep-alive\n\n") >= times:
                release.set()
    return raw


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_str_09_headers_and_arrivals(stack: Stack, path: str) -> None:
    """Each token reaches the client before the next is computed; the ingress is a matter of tests/system/chart."""
    ids = stack.encode("a b c d e f g h i j")
    gates = [asyncio.Event() for _ in ids]
    stack.plays(*(step for gate, id_ in zip(gates, ids, strict=True) for step in (gate, [id_])), [EOS])
    body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "max_tokens": 100}
    got = 0
    gates[0].set()
    async with stack.http.stream("POST", f"/v1/{path}", json=body, headers={"accept-encoding": "gzip, br"}) as response:
        async for line in response.aiter_lines():
            choice = json.loads(line.removeprefix("data: "))["choices"][0] if line.startswith("data: {") else {}
            if choice.get("text") or choice.get("delta", {}).get("content"):
                got += 1
                if got < len(gates):
                    gates[got].set()
    assert got == len(ids) >= 8
    headers = response.headers
    assert headers["content-type"].startswith("text/event-stream")
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")
    assert "content-length" not in headers
    assert "content-encoding" not in headers


async def test_str_11_no_empty_chunks(stack: Stack) -> None:
    stack.says("hello, world and so on")
    for fields in ({"stop": "ZZZZ"}, {"stop": "world Z"}):
        chunks = await stack.chat_events(**fields)
        assert all(chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-1])


async def test_str_12_zero_and_one_token(stack: Stack) -> None:
    stack.plays([EOS])
    assert await stack.content() == ""
    assert [chunk["choices"][0]["finish_reason"] for chunk in await stack.chat_events()] == [None, "stop"]
    stack.plays([stack.encode("a")[0]], [EOS])
    whole = (await stack.chat(max_tokens=1)).json()
    assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", 1)
    assert await stack.content(max_tokens=1) == "a"
    assert len(await stack.chat_events(max_tokens=1)) == 3


@pytest.mark.parametrize("tokens_a_step", [1, 3, 100])
@pytest.mark.parametrize("finishes_apart", [False, True])
async def test_what_a_step_brings_changes_no_text(stack: Stack, tokens_a_step: int, finishes_apart: bool) -> None:
    stack.says("a😀é世 hello, world ends", tokens_a_step=tokens_a_step, finishes_apart=finishes_apart)
    for fields, expected in (({}, "a😀é世 hello, world ends"), ({"stop": ["world", "zz"]}, "a😀é世 hello, "), ({"stop": "世 h"}, "a😀é")):
        assert await stack.content(**fields) == expected
    chunks = await stack.chat_events()
    assert not any("\ufffd" in json.dumps(chunk, ensure_ascii=False) for chunk in chunks)


async def test_tok_10_special_tokens_in_the_text_are_hidden(stack: Stack) -> None:
    stack.plays(stack.encode("hello"), [1], stack.encode("world"), [EOS])
    assert await stack.content() == "helloworld"
    assert await stack.content(skip_special_tokens=False) == "hello<|im_start|>world"  # EOS is no part of the text


async def test_stp_04_stop_lists(stack: Stack) -> None:
    stack.says("a b c d", tokens_a_step=7)
    for stop, expected in ((["d", "b"], "a "), ("c", "a b "), ([], "a b c d"), (None, "a b c d")):
        assert await stack.content(stop=stop) == expected


async def test_stp_06_finish_reasons_at_the_edge(stack: Stack) -> None:
    ids = stack.says("hello")
    assert (await stack.chat(max_tokens=len(ids) + 1)).json()["choices"][0]["finish_reason"] == "stop"
    assert (await stack.chat(max_tokens=len(ids))).json()["choices"][0]["finish_reason"] == "length"
    assert (await stack.chat(max_tokens=len(ids), stop="o")).json()["choices"][0]["finish_reason"] == "stop"


async def test_stp_09_stop_token_ids_are_not_shown(stack: Stack) -> None:
    hello, x = stack.encode("hello"), stack.encode("x")
    stack.plays(hello, x, finishes_apart=True)
    assert await stack.content(stop_token_ids=x) == "hello"
    stack.plays([*hello, *x, *hello], [EOS], finishes_apart=True)  # not as the end: below min_tokens
    assert await stack.content(stop_token_ids=x, min_tokens=9) == "helloxhello"
    stack.plays(hello, x, step_s=0.01)
    assert await stack.content(stop_token_ids=x, max_tokens=len(hello) + 1) == "hellox"  # ended by length: it did not stop it


async def test_a_special_token_may_be_a_stop_string(stack: Stack) -> None:
    hello = stack.encode("hello")
    stack.plays(hello, [1])  # as an engine that stops at this id
    for fields in ({}, {"skip_special_tokens": False}, {"ignore_eos": True}):
        assert await stack.content(stop=["<|im_start|>", "zz"], stop_token_ids=[5], **fields) == "hello"
        assert ids_from_bytes(stack.scheduler.submits[-1].stop_token_ids).tolist() == [5, 1]
    completion = (await stack.complete(stop="<|im_end|>", ignore_eos=True)).json()["choices"][0]
    assert (completion["text"], completion["finish_reason"]) == ("hello", "stop")
    assert ids_from_bytes(stack.scheduler.submits[-1].stop_token_ids).tolist() == [EOS]
    assert_error(await stack.chat(stop="<|im_start|>", stop_token_ids=[*range(3, 19)]), 400, "stop", "array_above_max_length")


@pytest.mark.parametrize("tokens_a_step", [1, 100])
async def test_no_stop_string_ends_an_answer_below_min_tokens(stack: Stack, tokens_a_step: int) -> None:
    ids = stack.says("121212", tokens_a_step=tokens_a_step)
    assert len(ids) == 6
    for min_tokens, expected in ((0, "1"), (1, "1"), (2, "121"), (4, "12121"), (6, "121212")):
        assert await stack.content(stop="2", min_tokens=min_tokens) == expected
    assert (await stack.chat(stop="2", min_tokens=2)).json()["usage"]["completion_tokens"] == 4
    assert await stack.content(stop="212", min_tokens=3) == "1"  # begun below, complete above
    assert await stack.content(stop="212", min_tokens=4) == "121"


async def test_ignored_eos_does_not_hold_text_back(stack: Stack) -> None:
    never = asyncio.Event()
    stack.plays([*stack.encode("hello"), EOS], never)
    body = {"model": "tiny", "prompt": "hi", "stream": True, "ignore_eos": True}
    async with stack.http.stream("POST", "/v1/completions", json=body) as response:
        first = await anext(response.aiter_lines())
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "hello"


async def test_str_05_choices_side_by_side(stack: Stack) -> None:
    """They end in the order 2, 0, 1; each has its own role, text and end."""
    ids, gates = stack.encode("hello, world"), [asyncio.Event() for _ in range(3)]

    def script(submit: Any) -> Script:
        index = len(stack.scheduler.submits) - 1
        return Script([ids[: 2 + index], gates[index], ids[2 + index :], [EOS]]) if index else Script([ids[:2], gates[0]], LENGTH)

    stack.scheduler.script = script
    body = {"model": "tiny", "stream": True, "n": 3, "messages": [{"role": "user", "content": "hi"}], "seed": 1}
    chunks: list[dict[str, Any]] = []
    async with stack.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.aiter_lines()
        for gate, index in ((2, 2), (0, 0), (1, 1)):
            gates[gate].set()
            async for line in lines:
                if line.startswith("data: {"):
                    chunks.append(json.loads(line.removeprefix("data: ")))
                    choice = chunks[-1]["choices"][0]
                    if choice["finish_reason"]:
                        assert choice["index"] == index
                        break
        assert [line async for line in lines if line] == ["data: [DONE]"]
    assert [chunk["choices"][0]["index"] for chunk in chunks[:3]] == [0, 1, 2]
    texts = []
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert ["role" in choice["delta"] for choice in own] == [True] + [False] * (len(own) - 1)
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop" if index else "length"]
        texts.append("".join(choice["delta"].get("content", "") for choice in own))
    assert texts[1:] == ["hello, world"] * 2
    assert "hello, world".startswith(texts[0])


async def test_str_03_usage_of_two_choices(stack: Stack) -> None:
    """Three tokens a step; one ends by a stop string, one by length."""
    texts: dict[int, str] = {}

    def script(submit: Any) -> Script:
        text = texts.setdefault(submit.sampling.seed, "hello, world ends here" if not texts else "a b c d e f g h i j k l m n o p")
        ids = stack.encode(text)
        return Script([*(ids[start : start + 3] for start in range(0, len(ids), 3)), [EOS]], cached_tokens=2)

    stack.scheduler.script = script
    fields = {"n": 2, "seed": 1, "stop": "ends", "max_tokens": 12}
    whole = (await stack.chat(**fields)).json()
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop", "length"]
    chunks = await stack.chat_events(stream_options={"include_usage": True}, **fields)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    for index, choice in enumerate(whole["choices"]):
        own = [chunk["choices"][0]["delta"] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
        assert "".join(delta.get("content", "") for delta in own) == choice["message"]["content"]


async def test_can_04_all_choices_are_cancelled(stack: Stack) -> None:
    never = asyncio.Event()
    stack.plays(stack.encode("hello"), never)
    body = {"model": "tiny", "stream": True, "n": 4, "messages": [{"role": "user", "content": "hi"}]}
    async with stack.http.stream("POST", "/v1/chat/completions", json=body) as response:
        await anext(response.aiter_lines())
    await eventually_async(lambda: len(stack.scheduler.cancels) == 4)
    assert {cancel.request for cancel in stack.scheduler.cancels} == {submit.request for submit in stack.scheduler.submits}


async def test_can_04_a_choice_that_has_ended_is_not_cancelled(stack: Stack) -> None:
    never = asyncio.Event()
    stack.scheduler.script = lambda submit: Script([stack.encode("hello"), [EOS] if submit.request % 4 == 1 else never])
    body = {"model": "tiny", "stream": True, "n": 4, "messages": [{"role": "user", "content": "hi"}]}
    async with stack.http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if '"finish_reason":"stop"' in line:
                break
    await eventually_async(lambda: len(stack.scheduler.cancels) == 3)
    ended, *running = [submit.request for submit in stack.scheduler.submits]
    assert [cancel.request for cancel in stack.scheduler.cancels] == running
    assert ended not in running
    stack.says("hello")
    assert await stack.content() == "hello"
    assert len(stack.scheduler.cancels) == 3


async def test_a_request_leaves_nothing_for_the_garbage_collector(stack: Stack) -> None:
    stack.says("hello, world")
    gc.collect()
    gc.disable()
    try:
        for number in range(8):
            await (stack.chat_events() if number % 2 else stack.complete())
        left = [each for each in gc.get_objects() if isinstance(each, RequestMetrics)]
    finally:
        gc.enable()
    assert len(left) <= 1  # a connection that is kept open holds its last request
