"""Steps with prefill: those that are captured give the tokens of those that are launched, whatever they are filled up with."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.driver import Driver, admission, int32s
from services.worker.engine.engine import TorchEngine
from shared.protocol.plan import Plan
from tests.gpu.test_engine import PAGE_SIZE, engine_of, prompt
from tests.services.worker.models.checkpoints import MAX_LENGTH

SLOTS, MAX_STEP_TOKENS = 40, 4096
PAGES = MAX_LENGTH // PAGE_SIZE
DECODED = 4
# Lengths of prompts that are prefilled together; how much of each was prefilled before; decode rows beside them.
CASES: dict[str, tuple[Sequence[int], int, int]] = {
    "one token": ([1], 0, 0),
    "one token beside a decode row": ([1], 0, 1),
    "few": ([7, 30, 2], 0, 5),
    "as many rows as small sizes hold": ([8] * 15, 0, 0),
    "too many rows for the least size": ([8] * 16, 0, 3),
    "short ones": ([9] * 30, 0, 9),
    "one size exactly": ([512, 500, 12], 0, 2),
    "long ones": ([512, 400, 300, 20, 1], 0, 0),
    "long ones beside many": ([512, 511, 100, 3], 0, 30),
    "rests": ([512, 260, 258], 257, 8),
    "nearly all that a step holds": ([512] * 7 + [400], 0, 30),
}


@pytest.fixture(scope="module")
def engines(checkpoint: Callable[[str], Path]) -> tuple[TorchEngine, TorchEngine]:
    shape = {"slots": SLOTS, "num_pages": SLOTS * PAGES + 1, "max_step_tokens": MAX_STEP_TOKENS}
    return engine_of(checkpoint("qwen3"), **shape), engine_of(checkpoint("qwen3"), **shape, cuda_graphs=False)


def tokens_of(engine: TorchEngine, lengths: Sequence[int], before: int, decodes: int, sampling: dict[str, Any]) -> list[list[int]]:
    """Of a step with these rows, of the decode rows first, and of steps that decode them all."""
    engine.reset()
    driver, prompts = Driver(engine, PAGE_SIZE, PAGES, SLOTS), [prompt(length, row) for row, length in enumerate(lengths)]
    decoding, prefilled = list(range(decodes)), list(range(decodes, decodes + len(lengths)))
    first = [driver.prefill(slot, prompt(20 + slot), flags=1, **sampling) for slot in decoding]
    pages = np.arange(PAGES, dtype=np.int32)
    driver.execute(
        driver.plan(
            admissions=np.concatenate([admission(slot, MAX_LENGTH, flags=1, **sampling) for slot in prefilled]),
            grant_slots=np.repeat(np.array(prefilled, dtype=np.int32), PAGES),
            grant_indexes=np.tile(pages, len(prefilled)),
            grant_pages=np.concatenate([1 + slot + SLOTS * pages for slot in prefilled]),
        )
    )
    if before:
        for slot, ids in zip(prefilled, prompts, strict=True):
            driver.execute(_prefill(driver, [], [slot], [ids[:before]], 0, 0))
    (mixed,) = driver.execute(_prefill(driver, decoding, prefilled, [ids[before:] for ids in prompts], before, 1))
    assert engine.staging is not None
    if engine.graphs is not None:
        assert engine.staging.filled in engine.graphs.sizes.captured
    going_on = [slot for slot, length in zip(prefilled, lengths, strict=True) if length < MAX_LENGTH - DECODED]
    return [first, mixed, *driver.decode(*decoding, *going_on, iterations=DECODED)]


def _prefill(driver: Driver, decoding: list[int], slots: list[int], chunks: list[list[int]], start: int, flag: int) -> Plan:
    return driver.plan(
        decode_slots=int32s(*decoding),
        decode_flags=int32s(*[1] * len(decoding)),
        prefill_slots=int32s(*slots),
        prefill_starts=int32s(*[start] * len(slots)),
        prefill_lengths=int32s(*[len(chunk) for chunk in chunks]),
        prefill_flags=int32s(*[flag] * len(slots)),
        prefill_ids=int32s(*[each for chunk in chunks for each in chunk]),
    )


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_k": 20, "seed_low": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("case", CASES)
def test_captured_prefill_gives_the_tokens_of_launched(
    engines: tuple[TorchEngine, TorchEngine], case: str, sampling: dict[str, Any]
) -> None:
    captured, launched = (tokens_of(engine, *CASES[case], sampling) for engine in engines)
    assert all(token >= 0 for step in captured for token in step)
    assert captured == launched
