"""A KV cache of 64 tokens under a context of 256: what fits, what is shared, and that nobody waits for ever. Over HTTP."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.stack import Stack
from tests.processes import eventually

PAGE_SIZE, PAGES = 4, 17  # one of which nobody gets
REQUESTS = 300
IDLE_S = 2.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Stack]:
    sizes = ("--page-size", str(PAGE_SIZE), "--num-pages", str(PAGES), "--max-num-seqs", "8", "--deterministic", "true")
    with Stack(tmp_path_factory.mktemp("stack"), model=tiny_model, worker_args=sizes) as running:
        yield running


def prompt(number: int, length: int) -> list[int]:
    """Nobody shares its beginning."""
    return [3 + number % 300, 3 + number // 300 % 300, *[3 + (number * 7 + index) % 300 for index in range(length)]][:length]


def post(stack: Stack, ids: list[int], max_tokens: int, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}
    return stack.client.post("/v1/completions", json=body)


def complete(stack: Stack, ids: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = post(stack, ids, max_tokens, **fields).raise_for_status().json()
    return answer


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def at_rest(stack: Stack) -> bool:
    values = stack.scheduler.metrics()
    return not any(values[f"lockstep_{name}"] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"))


@pytest.mark.timed
@pytest.mark.parametrize("length, max_tokens", [(100, 5), (40, 100), (65, 1), (64, 2)])
@pytest.mark.parametrize("stream", [False, True])
def test_sch_01_what_can_never_fit_is_refused_at_once(stack: Stack, length: int, max_tokens: int, stream: bool) -> None:
    began = time.monotonic()
    answer = post(stack, prompt(1, length), max_tokens, stream=stream)
    assert time.monotonic() - began < 1
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_sch_01_what_just_fits_ends_beside_others(stack: Stack) -> None:
    assert complete(stack, prompt(2, 64), 1)["choices"][0]["finish_reason"] == "length"
    usage = complete(stack, prompt(3, 40), 25)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (40, 25)


def test_pfx_03_a_second_turn_reuses_the_answer_of_the_first(stack: Stack) -> None:
    first = complete(stack, prompt(4, 17), 14)
    text = first["choices"][0]["text"]
    ids = stack.client.post("/tokenize", json={"model": "tiny", "prompt": text, "add_special_tokens": False}).json()["tokens"]
    turn = [*prompt(4, 17), *ids, 5, 6]
    found = cached_tokens(complete(stack, turn, 2))
    assert found >= 17 - PAGE_SIZE  # the prompt in any case; the answer as far as its text is made of the same ids again
    assert found <= 17 + 14


def test_pfx_05_an_edge_in_use_is_split_while_pages_run_out(stack: Stack) -> None:
    common = prompt(5, 14)
    asks = [([*common, 7, 8], 30), ([*common, 9], 6), (prompt(6, 30), 8)]  # the third needs what the others leave
    alone = [complete(stack, ids, tokens)["choices"][0]["text"] for ids, tokens in asks]

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            answers = [
                client.completions.create(model="tiny", prompt=ids, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True})
                for ids, tokens in asks
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*answers)]

    for _ in range(3):
        assert asyncio.run(together()) == alone
    eventually(lambda: at_rest(stack))


def test_pfx_07_prefixes_are_shared_within_a_salt_only(stack: Stack) -> None:
    ids = prompt(7, 24)
    found = [cached_tokens(complete(stack, ids, 1, **({"cache_salt": salt} if salt else {}))) for salt in ("a", "b", "a", "", "")]
    assert found == [0, 0, 20, 0, 20]
    assert post(stack, ids, 1, cache_salt="").status_code == 400


@pytest.mark.timeout(180)
async def test_sch_08_nothing_is_lost(stack: Stack) -> None:
    """Random lengths, several choices, stop strings and clients that leave; then all is at rest, and idle."""
    chance = Random(8)
    steps = "lockstep_worker_step_seconds_count"
    before = stack.worker.metrics()[steps]

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        async with gate:
            parameters: dict[str, Any] = {"max_tokens": chance.randint(1, 15), "n": chance.choice([1, 1, 1, 2]), "seed": number}
            if chance.random() < 0.3:
                parameters["stop"] = chance.choice(["a", "e", "the"])
            leaves = chance.random() < 0.2
            stream = await client.completions.create(model="tiny", prompt=prompt(number, chance.randint(1, 25)), stream=True, **parameters)
            async with stream:
                async for chunk in stream:
                    if leaves:
                        return "left"
                    if chunk.choices and chunk.choices[0].finish_reason:
                        return "ended"
        return "broken"

    gate = asyncio.Semaphore(24)
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
        outcomes = await asyncio.gather(*(ask(client, number) for number in range(REQUESTS)))
    assert set(outcomes) == {"ended", "left"}
    assert stack.worker.metrics()[steps] > before
    await asyncio.to_thread(eventually, lambda: at_rest(stack))
    services = [psutil.Process(service.pid) for service in (stack.gateway, stack.scheduler, stack.worker)]
    spent = [-sum(process.cpu_times()[:2]) for process in services]
    await asyncio.sleep(IDLE_S)  # what is measured
    spent = [used + sum(process.cpu_times()[:2]) for used, process in zip(spent, services, strict=True)]
    assert max(spent) < 0.05 * IDLE_S + 0.02  # of a core; its clock ticks in hundredths
