"""Many at once, some of whom leave: the rest are right, and everything is back afterwards."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.stack import Stack
from tests.processes import eventually

STREAMS = 16
TOKENS = 60


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with Stack(folder, model=tiny_model, worker_args=["--max-num-seqs", "8", "--num-pages", "80", "--page-size", "8"]) as running:
        yield running


def prompt(number: int) -> list[int]:
    return [3 + (number * 31 + index * 7) % 300 for index in range(1 + number * 11 % 90)]


async def read(client: openai.AsyncOpenAI, number: int, leave_after: int | None = None) -> str:
    text, chunks = "", 0
    stream = await client.completions.create(
        model="tiny", prompt=prompt(number), max_tokens=TOKENS, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    async with stream:
        async for chunk in stream:
            text += chunk.choices[0].text
            chunks += 1
            if chunks == leave_after:
                break
    return text


def at_rest(stack: Stack) -> bool:
    values = stack.scheduler.metrics()
    return not any(
        values[name] for name in ("lockstep_num_requests_running", "lockstep_num_requests_waiting", "lockstep_kv_cache_usage_perc")
    )


async def test_sch_06_streams_are_right_beside_others_that_leave(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        alone = [await read(client, number) for number in range(STREAMS)]
        leavers = {number: 3 + number for number in range(0, STREAMS, 3)}
        together = await asyncio.gather(*(read(client, number, leavers.get(number)) for number in range(STREAMS)))
    for number in range(STREAMS):
        if number in leavers:
            assert alone[number].startswith(together[number])
        else:
            assert together[number] == alone[number]
    await asyncio.to_thread(eventually, lambda: at_rest(stack))
    values = stack.scheduler.metrics()
    assert values["lockstep_scheduler_outstanding_plans"] == 0
    # Some may have computed all of their tokens before the news that their clients had left.
    assert 2 * STREAMS - len(leavers) <= values["lockstep_request_success_total"] <= 2 * STREAMS


async def test_can_04_a_client_leaves_with_several_prompts_in_flight(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        stream = await client.completions.create(
            model="tiny", prompt=[prompt(number) for number in range(4)], max_tokens=150, stream=True, extra_body={"ignore_eos": True}
        )
        async with stream:
            await anext(aiter(stream))
    await asyncio.to_thread(eventually, lambda: at_rest(stack))
