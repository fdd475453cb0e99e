"""What clients may not do: choose for others, multiply work, bring templates of their own."""

import asyncio
import json
import time
from typing import Any

import psutil

from services.gateway.openai.submission import MAX_PROMPT_TOKENS
from shared.protocol.generation_pb2 import Submit
from tests.services.gateway.conftest import EOS, Stack, assert_error

MB = 1 << 20
INNER = {
    "rid": "other",
    "request_id": "other",
    "priority": 100,
    "data_parallel_rank": 3,
    "bootstrap_host": "example.org",
    "bootstrap_port": 80,
    "kv_transfer_params": {"a": 1},
    "input_ids": [1, 2, 3],
    "lora_path": "/etc/passwd",
    "sampling_seed": 5,
    "tenant": "other",
    "skip_radix": True,
    "deadline_ms": 1,
    "__class__": "Submit",
}


def comparable(submit: Submit) -> Submit:
    """Without what differs from request to request."""
    copy = Submit.FromString(submit.SerializeToString())
    for field in ("request", "request_id", "deadline_ms", "age_ms"):
        copy.ClearField(field)
    return copy


async def test_sec_06_inner_fields_are_not_for_clients(stack: Stack) -> None:
    stack.plays([40], [EOS])
    for body in ({}, INNER):
        assert (await stack.chat(seed=1, **body)).status_code == 200
        assert (await stack.complete(seed=1, **body)).status_code == 200
    plain_chat, plain, chat, completion = map(comparable, stack.scheduler.submits)
    assert (chat, completion) == (plain_chat, plain)
    assert stack.scheduler.submits[2].deadline_ms > 1000


async def test_sec_06_equal_ids_are_requests_apart(stack: Stack) -> None:
    """Two users who send one id get their own answers, and one who leaves ends only their own."""
    held = asyncio.Event()
    stack.plays([40], held, [EOS])
    header = {"X-Request-Id": "same"}
    body = {"model": "tiny", "prompt": "hi", "rid": "same"}
    first, second = (asyncio.create_task(stack.http.post("/v1/completions", json=body, headers=header)) for _ in range(2))
    while len(stack.scheduler.submits) < 2:
        await asyncio.sleep(0.01)
    first.cancel()
    while not stack.scheduler.cancels:
        await asyncio.sleep(0.01)
    held.set()
    assert (await second).json()["usage"]["completion_tokens"] == 2
    assert len({submit.request for submit in stack.scheduler.submits}) == 2
    assert len(stack.scheduler.cancels) == 1


async def test_sec_04_a_template_in_the_body_is_not_used(stack: Stack) -> None:
    stack.plays([40], [EOS])
    for body in ({}, {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}):
        answer = await stack.chat(**body)
        assert answer.status_code in (200, 400)
    assert len({tuple(prompt) for prompt in stack.scheduler.prompts}) == 1
    for name in ("messages", "tools", "bos_token", "chat_template", "add_generation_prompt"):
        assert_error(await stack.chat(chat_template_kwargs={name: "x"}), 400, "chat_template_kwargs")


TOOL = {"type": "function", "function": {"name": "f"}}


MULTIPLIERS: list[tuple[str, dict[str, Any], str | None]] = [
    ("completions", {"prompt": ["hi"] * 1000, "n": 128}, "prompt"),
    ("completions", {"prompt": [[5]] * 90_000}, "prompt"),
    ("completions", {"prompt": ["hi"] * 2, "n": 128}, "n"),
    ("chat/completions", {"n": 129}, "n"),
    ("chat/completions", {"logit_bias": {str(number): 1 for number in range(500_000)}}, "logit_bias"),
    ("chat/completions", {"stop": ["x" * MB] * 4}, "stop"),
    ("chat/completions", {"stop_token_ids": [5] * 500_000}, "stop_token_ids"),
    ("chat/completions", {"tools": [TOOL] * 90_000}, None),
    ("chat/completions", {"tools": [TOOL] * 40_000}, "tools"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}] * 50_000}, "messages"),
    ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat/completions", {"chat_template_kwargs": {f"a{number}": 1 for number in range(1000)}}, "chat_template_kwargs"),
]


async def test_sec_05_multipliers_are_bounded(stack: Stack) -> None:
    process, slowest = psutil.Process(), 0.0

    async def probe() -> None:
        nonlocal slowest
        while True:
            asked = time.thread_time()  # of the event loop's thread: other processes of the machine do not count
            assert (await stack.http.get("/health")).status_code == 200
            slowest = max(slowest, time.thread_time() - asked)
            await asyncio.sleep(0.01)

    for path, body, param in MULTIPLIERS:
        default = {"prompt": "hi"} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
        content = json.dumps({"model": "tiny", **default, **body}).encode()  # not timed: client and gateway share this process
        before = process.memory_info().rss
        probing = asyncio.create_task(probe())
        answer = await stack.http.post(f"/v1/{path}", content=content, headers={"Content-Type": "application/json"})
        probing.cancel()
        assert_error(answer, 400, param)
        assert process.memory_info().rss - before < 200 * MB
    assert not stack.scheduler.submits
    assert slowest < 1.0


async def test_sec_05_long_prompts_times_choices_are_bounded(start: Any) -> None:
    stack: Stack = await start({"max_length": 1 << 20})
    stack.plays([40], [EOS])
    prompt = [5] * (MAX_PROMPT_TOKENS // 128 + 1)
    assert_error(await stack.complete(prompt=prompt, n=128), 400, "n", "integer_above_max_value")
    assert not stack.scheduler.submits
    assert (await stack.complete(prompt=prompt, n=2)).status_code == 200
