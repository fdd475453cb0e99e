"""The same tokens whatever the scheduler does to bring them about: with the real engine, in its deterministic mode.

One worker process for each page size; schedulers with all kinds of settings, in this process, take it over one after the other.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.e2e.stack import START_S, STOP_S, Service
from tests.exposition import samples
from tests.processes import Family, eventually
from tests.services.scheduler.session_client import SessionClient, session, submit
from tests.services.scheduler.test_service import scheduling

CONVERSATIONS = 24
NEW_TOKENS = 12
PAGES = {1: 280, 4: 1_000, 16: 300}  # by page size: few where preemption is to be forced
BASE: dict[str, Any] = {"prefix_cache": False, "overlap": False}
# (page size, requests at a time, settings, whether some must be preempted)
VARIANTS = {
    "8 at a time, without a cache": (16, 8, BASE, False),
    "cache": (16, 8, {}, False),
    "cache, alone": (16, 1, {}, False),
    "all at once": (16, CONVERSATIONS, {}, False),
    "without bursts": (16, 8, {"bursts": False}, False),
    "without jumps": (16, 8, {"jump": False}, False),
    "without lead": (16, 8, {"overlap": False}, False),
    "prompts first, small chunks": (4, 8, {"policy": "prefill-first", "max_step_tokens": 16}, False),
    "streams first, small chunks": (4, 8, {"policy": "decode-first", "max_step_tokens": 16}, False),
    "chunks of odd size": (4, 8, {"max_step_tokens": 37}, False),
    "few pages": (1, CONVERSATIONS, {"max_step_tokens": 48}, True),
    "few pages, without a cache": (1, CONVERSATIONS, {"prefix_cache": False}, True),
    "few pages, prompts first": (1, CONVERSATIONS, {"policy": "prefill-first", "overlap": False}, True),
}


def conversations() -> list[tuple[list[int], list[int]]]:
    """(prompt, what is said next); a few beginnings are common."""
    chance = Random(40)
    systems = [[chance.randrange(3, 300) for _ in range(length)] for length in (20, 33, 48)]
    long = [chance.randrange(3, 300) for _ in range(200)]
    extremes = [([7], [8]), (long, [9]), (long, [10]), (long[:150], [11])]  # one token, two equal prompts, a part of them
    return extremes + [
        (
            chance.choice(systems) + [chance.randrange(3, 300) for _ in range(chance.randint(1, 30))],
            [chance.randrange(3, 300) for _ in range(chance.randint(1, 9))],
        )
        for _ in range(CONVERSATIONS - len(extremes))
    ]


@asynccontextmanager
async def scheduled(folder: Path, worker: Service, settings: dict[str, Any]) -> AsyncIterator[tuple[SessionClient, int]]:
    """A session with a scheduler of these settings, and its admin port."""
    folder.mkdir(exist_ok=True)
    (folder / "ports.json").unlink(missing_ok=True)
    at = SimpleNamespace(port=worker.ports["grpc"])
    async with scheduling(folder, at, **settings) as target, session(target) as client:  # type: ignore[arg-type]
        yield client, json.loads((folder / "ports.json").read_text())["admin"]


async def answers(client: SessionClient, at_a_time: int) -> tuple[list[list[int]], int]:
    """Both answers of each conversation, one after the other, and the tokens that came from the cache. Every other one is sampled."""
    gate = asyncio.Semaphore(at_a_time)
    cached = 0

    async def complete(number: int, prompt: list[int]) -> list[int]:
        nonlocal cached
        message = submit(number, prompt, NEW_TOKENS, ignore_eos=True)
        message.sampling.temperature, message.sampling.seed = number % 4 // 2, number
        client.submit(message)
        answer = await client.ended(number, within_s=100)
        assert answer.finished is not None, answer.rejected
        cached += answer.finished.cached_tokens
        return list(answer.ids)

    async def converse(number: int, prompt: list[int], more: list[int]) -> list[int]:
        async with gate:
            first = await complete(2 * number, prompt)
            return first + await complete(2 * number + 1, prompt + first + more)

    found = await asyncio.gather(*(converse(number, *each) for number, each in enumerate(conversations())))
    return list(found), cached


async def preemptions(admin_port: int) -> float:
    async with httpx.AsyncClient(trust_env=False, verify=False) as admin:
        found = samples(await admin.get(f"http://127.0.0.1:{admin_port}/metrics"))
    return sum(value for name, value in found.items() if name.startswith("lockstep_num_preemptions_total"))


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[dict[int, Service]]:
    family, started = Family(), {}
    try:
        for page_size, pages in PAGES.items():
            folder = tmp_path_factory.mktemp(f"pages-of-{page_size}")
            sizes = ("--page-size", str(page_size), "--num-pages", str(pages), "--max-num-seqs", "8")
            started[page_size] = Service("worker", folder, family, ("--model", str(tiny_model), "--deterministic", "true", *sizes))
        for worker in started.values():
            eventually(lambda worker=worker: worker.ready, START_S)  # type: ignore[misc]
        yield started
    finally:
        for worker in started.values():
            worker.terminate()
        for worker in started.values():
            worker.process.wait(STOP_S)
            worker.release_ports()
            print(f"---- worker, status {worker.process.returncode}\n{worker.log}")
        family.end()


@pytest.mark.timeout(400)
async def test_pfx_01_sch_06_no_way_to_schedule_changes_a_token(workers: dict[int, Service], tmp_path: Path) -> None:
    async with scheduled(tmp_path, workers[16], BASE) as (client, _):
        expected, cached = await answers(client, at_a_time=1)
    assert not cached
    for name, (page_size, at_a_time, settings, gives_way) in VARIANTS.items():
        async with scheduled(tmp_path, workers[page_size], settings) as (client, admin_port):
            got, cached = await answers(client, at_a_time)
            assert got == expected, name
            assert (cached > 300) == settings.get("prefix_cache", True), name
            gave_way = await preemptions(admin_port)
            print(f"{name}: {cached} tokens from the cache, {gave_way:.0f} preemptions")
            assert bool(gave_way) == gives_way, name
