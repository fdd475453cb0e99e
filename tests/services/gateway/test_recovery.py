"""What the gateway does when its scheduler is lost, stops, or sends what cannot be: the client's stream goes on in the next attempt."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.errors import Unavailable
from services.gateway.generation import MAX_MOVES, Generation
from shared.protocol.generation_pb2 import Finished, FinishReason, Submit, Tokens
from shared.protocol.plan import ids_from_bytes, ids_to_bytes
from tests.exposition import samples
from tests.processes import eventually_async
from tests.services.gateway.conftest import EOS, Stack, assert_error
from tests.services.gateway.scripted_scheduler import Script, ScriptedScheduler

TEXT = "hello world"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
INFLIGHT = "lockstep_gateway_inflight_requests{endpoint=/v1/chat/completions}"
BEGUN = "lockstep_gateway_time_to_first_token_seconds_count"
HOW: dict[str, Callable[[ScriptedScheduler], Any]] = {"dies": ScriptedScheduler.stop, "stops": ScriptedScheduler.end_sessions}


def generation() -> tuple[Generation, list[Generation]]:
    """One whose second attempt has been sent, and who was told that it broke."""
    broken: list[Generation] = []
    submit = Submit(request=1, attempt=1, prompt_ids=ids_to_bytes([5]), deadline_ms=60_000)
    request = Generation(submit, asyncio.Event(), 100, lambda _, accepted, whole: None, broken.append)
    request.next_submit(planned=False)
    request.next_submit(planned=True)
    assert (request.submit.attempt, broken) == (2, [])
    return request, broken


def tokens(first_index: int, ids: list[int], attempt: int = 2) -> Tokens:
    return Tokens(request=1, attempt=attempt, first_index=first_index, ids=ids_to_bytes(ids))


def finished(completion_tokens: int) -> Finished:
    return Finished(request=1, attempt=2, reason=FinishReason.FINISH_REASON_STOP, completion_tokens=completion_tokens)


@pytest.mark.parametrize("wrong", [tokens(2, [9]), tokens(0, [8]), tokens(0, [8, 9]), Tokens(attempt=2, first_index=1, ids=b"abc")])
async def test_a_gap_or_a_difference_needs_another_attempt_after_what_came(wrong: Tokens) -> None:
    request, broken = generation()
    request.on_tokens(tokens(0, [7]))
    request.on_tokens(wrong)
    assert broken == [request]
    submit = request.next_submit(planned=False)
    assert submit is not None
    assert (submit.attempt, ids_from_bytes(submit.delivered_ids).tolist()) == (3, [7])
    request.on_tokens(tokens(1, [8]))  # late, of the attempt before
    request.on_tokens(tokens(1, [9], attempt=3))
    assert request.take() == [7, 9]


@pytest.mark.parametrize("completion_tokens", [0, 2])
async def test_so_does_an_end_after_another_number_of_ids(completion_tokens: int) -> None:
    request, broken = generation()
    request.on_tokens(tokens(0, [7]))
    request.on_finished(finished(completion_tokens))
    assert (broken, request.over) == ([request], False)


async def test_moves_that_nobody_planned_are_few_and_planned_ones_are_free() -> None:
    request, _ = generation()
    for _ in range(MAX_MOVES):
        assert request.next_submit(planned=True) is not None
        assert request.next_submit(planned=False) is not None
    assert request.next_submit(planned=True) is not None
    assert request.next_submit(planned=False) is None
    with pytest.raises(Unavailable) as caught:
        request.take()
    assert caught.value.retry_after_s


async def test_groups_that_a_scheduler_has_lost_count_as_moves() -> None:
    request, _ = generation()
    request.on_tokens(Tokens(request=1, attempt=2, unplanned_moves=MAX_MOVES - 1))
    submit = request.next_submit(planned=True)
    assert submit is not None
    assert submit.unplanned_moves == MAX_MOVES - 1
    submit = request.next_submit(planned=False)
    assert submit is not None
    assert submit.unplanned_moves == MAX_MOVES
    assert request.next_submit(planned=False) is None


async def test_an_attempt_tells_its_age_and_what_is_left_of_its_time() -> None:
    request, _ = generation()
    submit = request.submit
    await eventually_async(lambda: request.next_submit(planned=True) is not None and submit.age_ms >= 50)
    assert submit.age_ms < 30_000
    assert submit.deadline_ms + submit.age_ms == pytest.approx(60_000, abs=2)


@pytest.mark.parametrize("fault", [{"index_shift": 1}, {"index_shift": -1}, {"lost_tokens": 1}])
async def test_clients_do_not_see_a_broken_sequence(stack: Stack, fault: dict[str, Any]) -> None:
    ids = [[each] for each in stack.encode(TEXT)]
    stack.scheduler.script = lambda submit: Script([*ids, [EOS]], **(fault if submit.attempt == 1 else {}))
    assert (await stack.chat()).json()["choices"][0]["message"]["content"] == TEXT
    assert [submit.attempt for submit in stack.scheduler.submits] == [1, 2]
    assert (await metrics(stack))["lockstep_gateway_resubmissions_total{cause=broken}"] == 1


async def test_a_sequence_that_breaks_again_and_again_is_an_error(stack: Stack) -> None:
    stack.says(TEXT, index_shift=1)
    response = await stack.chat()
    assert_error(response, 503, None)
    assert response.headers["retry-after"]
    assert len(stack.scheduler.submits) == 1 + MAX_MOVES
    await eventually_async(lambda: stack.scheduler.cancels)


@pytest.mark.parametrize("how", HOW)
async def test_streams_go_on_with_the_scheduler_that_comes_back(stack: Stack, how: str) -> None:
    never = asyncio.Event()
    first, *rest = ([each] for each in stack.encode(TEXT))
    stack.plays(first, never)
    asked = [asyncio.create_task(stack.chat(stream=stream)) for stream in (False, True)]
    await until_begun(stack, 2)
    hellos = len(stack.scheduler.hellos)
    await HOW[how](stack.scheduler)
    if how == "stops":
        await stack.scheduler.stop(grace_s=10)  # the ends of its sessions reach the gateway
    stack.plays(first, *rest, [EOS])
    asked.append(asyncio.create_task(stack.chat()))  # while there is none
    await until_inflight(stack, 3)
    await stack.scheduler.start()
    whole, streamed, late = await asyncio.gather(*asked)
    assert whole.json()["choices"][0]["message"]["content"] == TEXT
    assert late.json()["choices"][0]["message"]["content"] == TEXT
    assert (
        "".join(
            json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
            for line in streamed.text.split("\n\n")
            if line.startswith("data: {")
        )
        == TEXT
    )
    again = stack.scheduler.submits[2:]
    assert sorted((submit.request, submit.attempt) for submit in again) == [(1, 2), (2, 2), (3, 1)]
    assert [len(submit.delivered_ids) // 4 for submit in again] == [1, 1, 0]
    assert [submit.request for submit in again] == [1, 2, 3]  # as they came
    assert stack.scheduler.hellos[hellos].highest_epoch == 1
    cause = {"dies": "lost", "stops": "moved"}[how]
    assert (await metrics(stack))[f"lockstep_gateway_resubmissions_total{{cause={cause}}}"] == 2


async def test_streams_go_on_after_a_scheduler_fell_silent(stack: Stack) -> None:
    never = asyncio.Event()
    first, *rest = ([each] for each in stack.encode(TEXT))
    stack.plays(first, never)
    asked = asyncio.create_task(stack.chat())
    await eventually_async(lambda: stack.scheduler.submits)
    stack.scheduler.fall_silent()
    await eventually_async(lambda: len(stack.scheduler.hellos) > 1)
    await stack.scheduler.stop()
    stack.plays(first, *rest, [EOS])
    await stack.scheduler.start()
    assert (await asked).json()["choices"][0]["message"]["content"] == TEXT


async def test_without_a_scheduler_requests_end_after_a_while_with_an_error_that_is_worth_a_retry(start: Any) -> None:
    stack = await start(scheduler_wait_s=0.3)
    ids = stack.encode(TEXT)
    stack.plays(ids, asyncio.Event())
    whole = asyncio.create_task(stack.chat())
    async with stack.http.stream("POST", "/v1/chat/completions", json=BODY) as response:
        lines = response.aiter_lines()
        await anext(lines)
        begun = time.monotonic()
        await stack.scheduler.stop()
        rest = [line async for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["type"] == "server_error"
    for answer in (await whole, await stack.chat(), await stack.http.get("/health")):
        assert_error(answer, 503, None)
        assert answer.headers["retry-after"]
    assert time.monotonic() - begun < 5
    await stack.scheduler.start()
    stack.says("back")
    await until_answered(stack)


async def test_the_deadline_of_a_request_counts_while_it_is_held(start: Any) -> None:
    stack = await start(timeout_s=1.5)
    stack.plays(stack.encode(TEXT), asyncio.Event())
    asked = asyncio.create_task(stack.chat())
    await eventually_async(lambda: stack.scheduler.submits)
    await stack.scheduler.stop()
    assert_error(await asked, 504, None)


async def test_a_client_that_leaves_while_its_request_is_held_is_not_submitted_again(stack: Stack) -> None:
    stack.plays(stack.encode(TEXT), asyncio.Event())
    async with stack.http.stream("POST", "/v1/chat/completions", json=BODY) as response:
        await anext(response.aiter_lines())
        await stack.scheduler.stop()
    await until_inflight(stack, 0)
    await stack.scheduler.start()
    stack.says("back")
    await until_answered(stack)
    assert len({submit.request for submit in stack.scheduler.submits[1:]} & {1}) == 0


async def test_the_leader_is_found_among_several(start: Any, tokenizer_folder: Path) -> None:
    standby = ScriptedScheduler(tokenizer_folder, ready=False, epoch=2)
    await standby.start()
    stack = await start(more_schedulers=[standby])
    never = asyncio.Event()
    first, *rest = ([each] for each in stack.encode(TEXT))
    stack.plays(first, never)
    asked = asyncio.create_task(stack.chat())
    await eventually_async(lambda: stack.scheduler.submits)
    await stack.scheduler.stop()
    standby.script = lambda submit: Script([first, *rest, [EOS]])
    standby.ready = True
    assert (await asked).json()["choices"][0]["message"]["content"] == TEXT
    assert [submit.attempt for submit in standby.submits] == [2]
    await stack.scheduler.start()  # with the old epoch: nobody goes back
    standby.script = lambda submit: Script([stack.encode("still"), [EOS]])
    assert await stack.content() == "still"
    await standby.close()
    await eventually_async(lambda: len(stack.scheduler.hellos) > 1)  # it is shown what has been seen
    assert stack.scheduler.hellos[-1].highest_epoch == 2


async def test_requests_do_not_go_on_with_another_model(stack: Stack, tmp_path: Path) -> None:
    stack.plays(stack.encode(TEXT), asyncio.Event())
    asked = asyncio.create_task(stack.chat())
    await eventually_async(lambda: stack.scheduler.submits)
    await stack.scheduler.stop()
    stack.scheduler.fingerprint = "0" * 64
    await stack.scheduler.start()
    assert_error(await asked, 503, None)
    assert len(stack.scheduler.submits) == 1


async def test_a_request_whose_worker_is_lost_for_good_is_worth_a_retry(stack: Stack) -> None:
    stack.plays(stack.encode(TEXT), reason=FinishReason.FINISH_REASON_UNAVAILABLE, detail="the worker was lost")
    response = await stack.chat()
    error = assert_error(response, 503, None)
    assert error["message"] == "the worker was lost: try again later"
    assert response.headers["retry-after"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_that_the_scheduler_notices_first_is_a_timeout(stack: Stack, stream: bool) -> None:
    stack.plays(reason=FinishReason.FINISH_REASON_DEADLINE, detail="the deadline passed")
    assert_error(await stack.chat(stream=stream), 504, None)


async def metrics(stack: Stack) -> dict[str, float]:
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        return samples(await client.get(f"{stack.admin_url}/metrics"))


async def until_begun(stack: Stack, requests: int) -> None:
    """So many have got their first token."""
    async with asyncio.timeout(30):
        while sum(value for name, value in (await metrics(stack)).items() if name.startswith(BEGUN)) != requests:
            await asyncio.sleep(0.01)


async def until_inflight(stack: Stack, requests: int) -> None:
    async with asyncio.timeout(30):
        while (await metrics(stack))[INFLIGHT] != requests:
            await asyncio.sleep(0.01)


async def until_answered(stack: Stack) -> None:
    async with asyncio.timeout(30):
        while (await stack.chat()).status_code != 200:
            await asyncio.sleep(0.05)
