"""The session with the scheduler: who owns the sequence, what happens when the session breaks, who cancels what."""

import asyncio
import json
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from services.gateway.generation import Generation
from services.gateway.model import cache_folder
from services.gateway.scheduler_client import SchedulerClient
from shared.errors import ConfigError
from shared.protocol.generation_pb2 import Finished, FinishReason, RejectReason, Submit, Tokens
from shared.protocol.plan import ids_to_bytes
from tests.processes import eventually_async
from tests.services.gateway.conftest import EOS, Stack, assert_error
from tests.services.gateway.scripted_scheduler import LENGTH, Script
from tests.tiny import tiny_tokenizer

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def generation(max_unread: int = 100) -> tuple[Generation, list[int]]:
    """One that was submitted as attempt 2, and the counts with which it was closed."""
    closed: list[int] = []
    submit = Submit(request=1, attempt=2, prompt_ids=ids_to_bytes([5]))
    return Generation(submit, asyncio.Event(), max_unread, lambda _, accepted, whole: closed.append(accepted), lambda _: None), closed


def tokens(first_index: int, ids: list[int], attempt: int = 2) -> Tokens:
    return Tokens(request=1, attempt=attempt, first_index=first_index, ids=ids_to_bytes(ids))


async def test_only_the_current_attempt_counts() -> None:
    request, closed = generation()
    request.on_tokens(tokens(0, [7], attempt=1))
    request.on_tokens(tokens(0, [8]))
    request.on_finished(Finished(request=1, attempt=1, reason=FinishReason.FINISH_REASON_STOP, completion_tokens=1))
    assert (request.take(), request.over, closed) == ([8], False, [])


async def test_ids_that_are_here_already_are_compared_and_dropped() -> None:
    request, _ = generation()
    for each in (tokens(0, [7, 8]), tokens(0, [7]), tokens(1, [8, 9]), tokens(3, [])):
        request.on_tokens(each)
    assert request.take() == [7, 8, 9]


async def test_an_older_epoch_is_ignored(start: Any) -> None:
    stack = await start(scheduler_wait_s=0)
    await stack.scheduler.stop()
    stack.scheduler.epoch = 0
    await stack.scheduler.start()
    await eventually_async(lambda: len(stack.scheduler.hellos) >= 2)
    assert (await stack.chat()).status_code == 503
    stack.scheduler.epoch = 5
    stack.says("x")
    deadline = time.monotonic() + 30
    while (await stack.chat()).status_code != 200:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_the_gateway_waits_for_a_ready_group(start: Any) -> None:
    stack = await start(scheduler={"ready": False}, wait=False)
    assert_error(await stack.chat(), 503, None)
    assert (await stack.http.get("/v1/models")).status_code == 200
    stack.scheduler.ready = True
    deadline = time.monotonic() + 30
    while (await stack.http.get("/health")).status_code != 200:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_files_are_fetched_once_for_each_model(start: Any, tmp_path: Path) -> None:
    first = await start()
    second = await start()
    assert (first.scheduler.files_calls, second.scheduler.files_calls) == (1, 0)
    (cache_folder() / first.scheduler.fingerprint / "tokenizer.json").write_text("{}")
    third = await start()
    assert third.scheduler.files_calls == 1
    other = tmp_path / "other"
    tiny_tokenizer(other, "{{ messages[0].content }}")
    third.says("x")
    await third.scheduler.stop()
    third.scheduler.folder, third.scheduler.fingerprint = other, "0" * 64
    await third.scheduler.start()
    await eventually_async(lambda: len(third.scheduler.hellos) == 2)
    deadline = time.monotonic() + 30
    while (response := await third.chat()).status_code != 200:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert response.json()["usage"]["prompt_tokens"] == len(third.encode("hi"))
    assert sorted(each.name for each in cache_folder().iterdir()) == ["0" * 64, "f" * 64]


async def test_mod_07_a_first_model_that_cannot_be_used_ends_the_gateway_and_a_later_one_is_waited_out(
    start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken"
    tiny_tokenizer(broken)
    (broken / "tokenizer.json").write_text('{"version": "2.0"}')
    stack = await start()
    stack.says("x")
    scheduler, own = stack.scheduler, stack.scheduler.fingerprint
    for folder, fingerprint in ((broken, "0" * 64), (scheduler.folder, own)):
        await scheduler.stop()
        scheduler.folder, scheduler.fingerprint = folder, fingerprint
        await scheduler.start()
        await eventually_async(lambda: "tokenizer files cannot be loaded" in caplog.text)
    deadline = time.monotonic() + 30
    while (await stack.chat()).status_code != 200:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)

    await scheduler.stop()
    scheduler.folder = broken
    await scheduler.start()
    first = SchedulerClient([f"127.0.0.1:{scheduler.port}"], 100, 1, lambda cause: None, None, apply_generation_config=False)
    shutil.rmtree(cache_folder())
    with pytest.raises(ConfigError, match="tokenizer files cannot be loaded"):
        await asyncio.wait_for(first.run(), 30)


async def test_an_unusable_cache_does_not_matter(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no-such-place")
    stack = await start()
    stack.says("hello")
    assert await stack.content() == "hello"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_can_01_a_client_that_leaves_cancels(stack: Stack, stream: bool, begun: bool) -> None:
    never = asyncio.Event()
    ids = stack.encode("hello")
    stack.plays(*([ids] if begun else []), never)
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.http.base_url.port)
    data = json.dumps({**BODY, "stream": stream}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await eventually_async(lambda: stack.scheduler.submits)
    if stream and begun:
        await reader.readuntil(b"hello")
    writer.close()
    await eventually_async(lambda: stack.scheduler.cancels)
    submit, cancel = stack.scheduler.submits[0], stack.scheduler.cancels[0]
    assert (cancel.request, cancel.attempt) == (submit.request, submit.attempt)
    assert cancel.accepted_tokens == (len(ids) if stream and begun else cancel.accepted_tokens)


@pytest.mark.parametrize("stream", [False, True])
async def test_can_05_a_stop_string_cancels_with_the_tokens_that_count(stack: Stack, stream: bool) -> None:
    ids = [stack.encode(letter)[0] for letter in "abcdefgh"]
    stack.plays(ids, *([each] for each in ids * 20))
    if stream:
        usage = (await stack.chat_events(stop="e", stream_options={"include_usage": True}))[-1]["usage"]
    else:
        usage = (await stack.chat(stop="e")).json()["usage"]
    assert usage["completion_tokens"] == 5
    await eventually_async(lambda: stack.scheduler.cancels)
    assert [cancel.accepted_tokens for cancel in stack.scheduler.cancels] == [5]


async def test_nothing_is_cancelled_that_has_finished(stack: Stack) -> None:
    stack.says("hello")
    await stack.content()
    await stack.chat(stop="hello")
    await stack.chat()
    assert len(stack.scheduler.cancels) <= 1


async def test_can_04_all_prompts_of_a_request_are_cancelled(stack: Stack) -> None:
    never = asyncio.Event()
    stack.plays(stack.encode("x"), never)
    async with stack.http.stream("POST", "/v1/completions", json={"model": "tiny", "prompt": ["a", "b", "c"], "stream": True}) as response:
        await anext(response.aiter_lines())
    await eventually_async(lambda: len(stack.scheduler.cancels) == 3)
    assert {cancel.request for cancel in stack.scheduler.cancels} == {submit.request for submit in stack.scheduler.submits}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long_ends(start: Any, stream: bool) -> None:
    stack = await start(timeout_s=0.3)
    stack.plays(asyncio.Event())
    assert_error(await stack.chat(stream=stream), 504, None)
    await eventually_async(lambda: stack.scheduler.cancels)
    stack.plays(stack.encode("x"), asyncio.Event())
    raw = (await stack.chat(stream=True)).text
    assert json.loads(raw.split("\n\n")[-2].removeprefix("data: "))["error"]["type"] == "server_error"


async def test_a_client_that_does_not_read_loses_its_request_alone(start: Any) -> None:
    stack = await start(scheduler={"max_length": 1 << 30}, max_unread_tokens=20_000)
    step = stack.encode("hello" * 1000)
    stack.plays(*[step] * 9000, reason=LENGTH, step_s=0.001)
    assert len(await stack.chat_events(max_tokens=100 * len(step))) > 5
    assert not stack.scheduler.cancels
    data = json.dumps({**BODY, "stream": True}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", stack.http.base_url.port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)
        await eventually_async(lambda: stack.scheduler.cancels)
        stack.says("hello")
        assert await stack.content() == "hello"


async def test_all_other_prompts_are_cancelled_when_one_is_rejected(stack: Stack) -> None:
    stack.scheduler.script = lambda submit: Script(
        [asyncio.Event()], rejected=RejectReason.REJECT_REASON_OVERLOADED if submit.request == 2 else None
    )
    assert_error(await stack.complete(prompt=["a", "b", "c"]), 429, None)
    await eventually_async(lambda: {cancel.request for cancel in stack.scheduler.cancels} == {1, 3})


async def test_answers_end_before_the_gateway_does(start: Any) -> None:
    stack = await start(drain_s=10)
    release = asyncio.Event()
    stack.plays(stack.encode("hello"), release, stack.encode(" world"), [EOS])
    async with stack.http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
        lines = response.aiter_lines()
        await anext(lines)
        stack.stop.set()
        asyncio.get_running_loop().call_later(0.3, release.set)
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", stack.http.base_url.port)


async def test_answers_that_take_too_long_to_end_get_an_error(start: Any) -> None:
    stack = await start(drain_s=0.2)
    stack.plays(stack.encode("hello"), asyncio.Event())
    async with stack.http.stream("POST", "/v1/chat/completions", json={**BODY, "stream": True}) as response:
        lines = response.aiter_lines()
        await anext(lines)
        stack.stop.set()
        rest = [line async for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["type"] == "server_error"
    assert stack.scheduler.left == 1  # which it is told, so that it can count what was cut off


async def test_a_long_prompt_does_not_hold_up_others(start: Any) -> None:
    stack = await start(scheduler={"max_length": 1 << 20})
    stack.says("x")
    long = asyncio.create_task(stack.chat(messages=[{"role": "user", "content": "once upon a time " * 60_000}]))
    for _ in range(3):
        assert (await stack.http.get("/health")).status_code == 200
    assert not long.done()
    assert (await long).json()["usage"]["prompt_tokens"] > 60_000
