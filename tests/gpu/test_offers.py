"""A head that makes offers on a GPU, in captured and launched steps: the tokens and log-probabilities that all logits give."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from kernels.offering_head import Config
from kernels.tuning import forget, tables
from services.scheduler.requests import Request
from services.worker.engine.engine import TorchEngine
from services.worker.engine.features import NO_FEATURES, Feature
from services.worker.engine.sections import decode_sections
from tests.gpu.test_engine import PAGE_SIZE, SLOTS, driver_of, engine_of
from tests.gpu.test_penalties_and_logprobs import check
from tests.services.joined import Joined
from tests.services.worker.engine.test_offers import MIX, requests_of

ENTRIES = {"1": Config(1, 32, 32, 4, 2, 0), "4": Config(8, 64, 32, 4, 2, 1), "64": Config(16, 64, 32, 4, 2, 0)}


@pytest.fixture(scope="module")
def engines(checkpoint: Callable[[str], Path]) -> Iterator[tuple[TorchEngine, TorchEngine, TorchEngine]]:
    """By all logits, and by offers, captured and launched."""
    by_logits = engine_of(checkpoint("qwen3"))
    weight = by_logits.model.head.weight
    table = tables(torch.device("cuda", 0)).setdefault(triton.__version__, {}).setdefault("32 bits", {})
    table["offering_head"] = {"x".join(map(str, weight.shape)): {rows: list(tuned) for rows, tuned in ENTRIES.items()}}
    forget()
    try:
        yield by_logits, engine_of(checkpoint("qwen3")), engine_of(checkpoint("qwen3"), cuda_graphs=False)
    finally:
        del table["offering_head"]
        forget()


def run(engine: TorchEngine, count: int, ways: list[dict[str, Any]]) -> list[Request]:
    joined, requests = Joined(engine, PAGE_SIZE, slots=SLOTS, max_step_tokens=48), requests_of(count, ways, {3: 7, 7: 9})
    joined.submit(*requests)
    joined.run(*requests)
    return requests


def scored(requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.scores is not None and request.scores.top is not None]


@pytest.mark.parametrize("count", [1, 13])
@pytest.mark.parametrize("ways", [MIX[:1], MIX[1:2], MIX], ids=["greedy", "temperatures", "all"])
def test_captured_and_launched_steps_choose_what_all_logits_give(
    engines: tuple[TorchEngine, TorchEngine, TorchEngine], ways: list[dict[str, Any]], count: int
) -> None:
    by_logits, captured, launched = engines
    assert captured.sampler.apart
    expected = run(by_logits, count, ways)
    for engine in (captured, launched):
        requests = run(engine, count, ways)
        assert [request.output.tolist() for request in requests] == [request.output.tolist() for request in expected]
        check(scored(requests), scored(expected))


@pytest.mark.parametrize("features", [NO_FEATURES, Feature.SAMPLING])
def test_rows_that_ask_for_no_more_than_a_temperature_have_no_logits(
    engines: tuple[TorchEngine, TorchEngine, TorchEngine], features: Feature
) -> None:
    engine = engines[2]
    driver = driver_of(engine)
    for slot in range(SLOTS):
        driver.prefill(slot, [5, 6, 7 + slot], temperature=1.0)
    sections = decode_sections(torch.arange(SLOTS, dtype=torch.int32, device="cuda"))
    batch = engine.batch(sections, 0)
    hidden, sampling = engine.model(batch, engine.caches), engine.slots.sampling(batch.slots, batch.lengths)
    scores = engine.sampler.score(hidden, sampling if features else None, features)
    assert scores.logits is None
    assert scores.offers is not None
    tokens = engine.sampler.choose(scores, sampling if features else None)
    assert ((tokens >= 0) & (tokens < engine.facts.vocab_size)).all()
