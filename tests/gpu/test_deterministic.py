"""Deterministic mode on a GPU: what a request yields, bit by bit, whatever it is computed with, however it is cut, and whoever computes it.

Real schedulers plan random mixes of the same requests: chunks, bursts, hits in the prefix cache and preemptions among them. A move to
another worker is a preemption by other means: the sequence so far is a prompt there.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from services.scheduler.requests import Request
from services.worker.engine.engine import TorchEngine
from tests.gpu.test_engine import engine_of
from tests.services.joined import Joined, completion_scores, sampled, scored_request
from tests.services.scheduler.build import make_request
from tests.services.worker.models.checkpoints import MAX_LENGTH, VOCAB_SIZE, make, qwen3, qwen3_moe

SLOTS, STEP_TOKENS, NEW_TOKENS = 8, 256, 16
PAGE_SIZE = 4  # cuts at many places, and requests that grow by several pages
MIXES = {"dense": 100, "experts": 60, "small": 40}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
MODELS: dict[str, Callable[[], Any]] = {
    "dense": lambda: qwen3(hidden_size=1024, intermediate_size=3072, initializer_range=0.03, **HEADS),
    "experts": lambda: qwen3_moe(hidden_size=512, moe_intermediate_size=256, initializer_range=0.04, **HEADS),
    "small": qwen3,
}
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.02},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.7, "biases": ((7, 3.0), (250, -100.0))},
]
Bits = tuple[list[int], bytes]  # tokens, and the records of their log-probabilities


def prompts() -> list[list[int]]:
    """A few beginnings are common."""
    chance = Random(11)
    beginnings = [[chance.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (20, 64, 130)]
    long = [chance.randrange(3, VOCAB_SIZE) for _ in range(400)]
    return [
        [7],
        long,
        long[:300],
        *(chance.choice(beginnings) + [chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randint(1, 40))] for _ in range(21)),
    ]


def requests(numbers: list[int], scored: bool) -> list[Request]:
    """Request n is the same each time, but for whether it wants log-probabilities."""
    known, found = prompts(), []
    for number in numbers:
        prompt, way = known[number], WAYS[number % len(WAYS)]
        plain = make_request(number, prompt, NEW_TOKENS, ignore_eos=True)
        found.append(scored_request(number, prompt, NEW_TOKENS, **way) if scored else sampled(plain, **way))
    return found


def bits_of(request: Request) -> Bits:
    assert len(request.output) == NEW_TOKENS
    if request.scores is None:
        return list(request.output), b""
    records = completion_scores(request).copy()
    records["row"] = 0  # of the plan
    return list(request.output), records.tobytes()


@pytest.fixture(scope="module", params=MIXES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, TorchEngine]:
    folder: Path = make(MODELS[request.param]().bfloat16(), tmp_path_factory.mktemp(request.param))
    sizes = {"page_size": PAGE_SIZE, "num_pages": SLOTS * MAX_LENGTH // PAGE_SIZE + 1, "max_step_tokens": STEP_TOKENS}
    return request.param, engine_of(folder, dtype="bfloat16", deterministic=True, **sizes)


def test_the_bits_of_a_request_do_not_depend_on_its_mix(made: tuple[str, TorchEngine]) -> None:
    kind, engine = made
    count, chance = len(prompts()), Random(3)
    alone: list[Bits] = []
    for number in range(count):
        joined, (request,) = Joined(engine, PAGE_SIZE, slots=SLOTS, max_step_tokens=STEP_TOKENS), requests([number], scored=True)
        joined.submit(request)
        joined.run(request)
        alone.append(bits_of(request))
    preempted = cached = 0
    for mix in range(MIXES[kind]):
        scored, few_pages = mix % 2 == 0, mix % 3 == 0
        options: dict[str, Any] = {
            "max_step_tokens": chance.choice((16, 37, 64, 130, STEP_TOKENS)),
            "policy": chance.choice(("mixed", "prefill-first", "decode-first")),
            "bursts": chance.random() < 0.7,
            "jump": chance.random() < 0.7,
            "prefix_cache": chance.random() < 0.8,
        }
        if few_pages:
            options["pages"] = MAX_LENGTH // PAGE_SIZE + 2
        joined = Joined(engine, PAGE_SIZE, slots=SLOTS, **options)
        chosen = requests(chance.sample(range(count), chance.randint(2, 14)), scored)
        first = chance.randint(1, len(chosen))
        joined.submit(*chosen[:first])
        joined.run(*chosen[:first], until_tokens=chance.randint(0, 6 * first))
        joined.submit(*chosen[first:])
        joined.run(*chosen)
        for request in chosen:
            tokens, records = bits_of(request)
            expected_tokens, expected_records = alone[request.key.request]
            assert tokens == expected_tokens, (mix, request.request_id, options)
            if scored:
                assert records == expected_records, (mix, request.request_id, options)
            preempted, cached = preempted + request.preemptions, cached + (request.cached_tokens or 0)
    assert preempted > 0
    assert cached > 0
