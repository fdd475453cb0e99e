"""The same tokens whatever the scheduler does to bring them about: with the real engine, in its deterministic mode."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.e2e.stack import Stack
from tests.services.scheduler.session_client import SessionClient, session, submit

CONVERSATIONS = 40
AT_A_TIME = 8
NEW_TOKENS = 12
WORKER = ("--deterministic", "true", "--max-num-seqs", "8")
VARIANTS = {
    "cache": (("--page-size", "16"), ()),
    "one token a page, few pages, small chunks": (("--page-size", "1", "--num-pages", "400"), ("--max-step-tokens", "48")),
    "prompts first, one plan at a time": (("--page-size", "4"), ("--policy", "prefill-first", "--overlap", "false")),
}


def conversations() -> list[tuple[list[int], list[int]]]:
    """(prompt, what is said next); a few beginnings are common."""
    chance = Random(40)
    systems = [[chance.randrange(3, 300) for _ in range(length)] for length in (20, 33, 48)]
    return [
        (
            chance.choice(systems) + [chance.randrange(3, 300) for _ in range(chance.randint(1, 30))],
            [chance.randrange(3, 300) for _ in range(chance.randint(1, 9))],
        )
        for _ in range(CONVERSATIONS)
    ]


async def answers(stack: Stack) -> tuple[list[list[int]], int]:
    """Both answers of each conversation, one after the other, and the tokens that came from the cache."""
    gate = asyncio.Semaphore(AT_A_TIME)
    cached = 0

    async def complete(client: SessionClient, number: int, prompt: list[int]) -> list[int]:
        nonlocal cached
        client.submit(submit(number, prompt, NEW_TOKENS, ignore_eos=True))
        answer = await client.ended(number, within_s=100)
        assert answer.finished is not None, answer.rejected
        cached += answer.finished.cached_tokens
        return list(answer.ids)

    async def converse(client: SessionClient, number: int, prompt: list[int], more: list[int]) -> list[int]:
        async with gate:
            first = await complete(client, 2 * number, prompt)
            return first + await complete(client, 2 * number + 1, prompt + first + more)

    async with session(stack.scheduler_address) as client:
        found = await asyncio.gather(*(converse(client, number, *each) for number, each in enumerate(conversations())))
    return list(found), cached


@pytest.mark.timeout(400)
async def test_pfx_01_the_cache_changes_nothing_but_speed(start_stack: Callable[..., Stack], tiny_model: Path) -> None:
    stack = start_stack(model=tiny_model, worker_args=WORKER, scheduler_args=("--prefix-cache", "false"))
    expected, cached = await answers(stack)
    assert not cached
    for name, (worker, scheduler) in VARIANTS.items():
        stack = start_stack(model=tiny_model, worker_args=(*WORKER, *worker), scheduler_args=scheduler)
        got, cached = await answers(stack)
        assert cached > 500, name
        assert got == expected, name
        preemptions = stack.scheduler.metrics()["lockstep_num_preemptions_total"]
        assert preemptions or "few pages" not in name
