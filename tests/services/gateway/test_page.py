"""The page's files and its source of figures; tests/system looks at it with a browser."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files

from services.gateway.page.routes import NAMES, PATHS
from shared.protocol.generation_pb2 import GenerationStatusResponse
from tests.services.gateway.conftest import Stack, assert_error

Start = Callable[..., Awaitable[Stack]]


async def test_the_page_is_served_under_a_strict_policy(stack: Stack) -> None:
    for path in PATHS:
        answer = await stack.http.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert not re.search(r"unsafe|\*|https?:|data:", policy)
        assert answer.headers["x-content-type-options"] == "nosniff"
    page = (await stack.http.get("/")).text
    assert not re.search(r"https?://|<script(?![^>]* src=)|\son\w+=|\sstyle=", page), "nothing from elsewhere, nothing inline"
    assert {*re.findall(r'(?:src|href)="(/[^"]*)"', page)} <= PATHS


def test_every_file_has_a_route() -> None:
    static = {file.name for file in files("services.gateway.page").joinpath("static").iterdir()}
    assert static == {*NAMES.values()}


async def test_the_page_can_be_switched_off(start: Start) -> None:
    stack = await start(page=False)
    for path in PATHS:
        assert_error(await stack.http.get(path), 404, None)
    assert (await stack.http.get("/health")).status_code == 200


async def test_status_tells_of_groups_and_asks_seldom(stack: Stack) -> None:
    group = GenerationStatusResponse.Group(name="a", ready=True, running=2, waiting=1, kv_usage=0.25, prompt_tokens=10, cached_tokens=4)
    stack.scheduler.status = GenerationStatusResponse(waiting=3, groups=[group])
    answers = await asyncio.gather(*(stack.http.get("/status") for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    told = answers[0].json()
    assert (told["models"], told["max_length"], told["waiting"]) == (["tiny", "org/tiny"], 256, 3)
    assert told["groups"] == [
        {
            "name": "a",
            "ready": True,
            "running": 2,
            "waiting": 1,
            "kv_usage": 0.25,
            "prompt_tokens": 10,
            "cached_tokens": 4,
            "generation_tokens": 0,
        }
    ]
    assert stack.scheduler.status_calls < 5


async def test_a_scheduler_that_tells_no_status_is_no_failure_of_ours(stack: Stack) -> None:
    for answer in await asyncio.gather(*(stack.http.get("/status") for _ in range(20))):
        assert_error(answer, 503, None)
        assert answer.headers["retry-after"]
    assert stack.scheduler.status_calls < 5
