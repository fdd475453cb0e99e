"""How long a client is let wait, and for what."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pydantic import ValidationError

from services.gateway.settings import MAX_TIMEOUT_S, GatewaySettings
from shared.protocol.generation_pb2 import Submit
from tests.processes import eventually_async
from tests.services.gateway.conftest import EOS, Stack, assert_error

Start = Callable[..., Awaitable[Stack]]


async def test_a_first_token_that_does_not_come(start: Start) -> None:
    stack = await start(first_token_timeout_s=0.2, idle_timeout_s=60)
    stack.plays(asyncio.Event())
    for stream in (False, True):
        assert_error(await stack.chat(stream=stream), 504, None)
    await eventually_async(lambda: len(stack.scheduler.cancels) == 2)


async def test_an_answer_that_does_not_go_on(start: Start) -> None:
    stack = await start(idle_timeout_s=0.2, first_token_timeout_s=60, keep_alive_s=0.05)
    stack.plays([40], asyncio.Event())
    assert_error(await stack.chat(), 504, None)
    answer = await stack.chat(stream=True)
    *_, last, rest = answer.text.split("\n\n")
    assert '"no token has come for' in last
    assert '"type":"server_error"' in last
    assert (rest, "[DONE]" in answer.text) == ("", False)
    await eventually_async(lambda: len(stack.scheduler.cancels) == 2)


async def test_each_token_gives_new_time(start: Start) -> None:
    stack = await start(idle_timeout_s=1.0, first_token_timeout_s=1.0)
    stack.plays(*([40 + step] for step in range(6)), [EOS], step_s=0.2)
    assert (await stack.chat()).status_code == 200


async def test_keep_alives_go_on_until_the_first_token_is_given_up(start: Start) -> None:
    stack = await start(first_token_timeout_s=1.0, keep_alive_s=0.1)
    stack.plays(asyncio.Event())
    answer = await stack.chat(stream=True)
    assert answer.text.count(": keep-alive\n\n") >= 2
    assert '"no token has come for' in answer.text


def test_the_longest_time_of_a_request_fits_in_all_that_hold_it() -> None:
    milliseconds = int(MAX_TIMEOUT_S * 1e3)
    assert Submit(deadline_ms=milliseconds).deadline_ms == milliseconds
    with socket.socket() as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    longer: dict[str, Any] = {"served_model_name": ["tiny"], "timeout_s": MAX_TIMEOUT_S + 1}
    with pytest.raises(ValidationError, match="timeout_s"):
        GatewaySettings(**longer)
