"""Requests with penalties, biases and log-probabilities on a GPU: what is captured, what is launched, and what a CPU computes."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.driver import admission, int32s
from services.scheduler.requests import Request
from services.worker.engine.engine import TorchEngine
from shared.protocol.plan import SlotFlag
from tests.gpu.test_engine import PAGE_SIZE, SLOTS, Checkpoint, captured, driver_of, engine_of, fraction_with, launched, step_of
from tests.services.joined import Joined, completion_scores, sampled, scored_request
from tests.services.worker.models.checkpoints import VOCAB_SIZE

__all__ = ["captured", "launched"]  # fixtures
NEAR = 1e-3
WAYS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.4},
    {"biases": ((7, 5.0), (250, -100.0))},
    {},
]


@pytest.fixture(scope="module")
def on_cpu(checkpoint: Checkpoint) -> TorchEngine:
    return engine_of(checkpoint("qwen3"), device="cpu")


def run(engine: TorchEngine, **options: Any) -> list[Request]:
    """Chunked, and twice: the second time on a warm cache."""
    joined = Joined(engine, PAGE_SIZE, slots=SLOTS, max_step_tokens=48, **options)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, VOCAB_SIZE, length).tolist() for length in (1, 5, 33, 70, 100, 64)]
    requests = []
    for round_ in range(2):
        requests = [
            sampled(scored_request(number, prompt, 12, prompt_top=None if number % 2 else 3), **WAYS[number % len(WAYS)])
            for number, prompt in enumerate(prompts, 10 * round_)
        ]
        joined.submit(*requests)
        joined.run(*requests)
    return requests


def check(ours: list[Request], theirs: list[Request]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.scores is not None
        assert other.scores is not None
        a, b = np.concatenate((one.scores.prompt, completion_scores(one))), np.concatenate((other.scores.prompt, completion_scores(other)))
        same = next((index for index, (x, y) in enumerate(zip(one.output, other.output, strict=True)) if x != y), len(one.output))
        count = len(one.scores.prompt) + same
        assert one.output == other.output, f"token {same} of {one.request_id}"
        np.testing.assert_array_equal(a["position"], b["position"])
        np.testing.assert_allclose(a["logprob"][:count], b["logprob"][:count], rtol=0, atol=NEAR)
        np.testing.assert_allclose(a["top_logprobs"][:count], b["top_logprobs"][:count], rtol=0, atol=NEAR)


def test_captured_and_launched_steps_give_what_a_cpu_gives(captured: TorchEngine, launched: TorchEngine, on_cpu: TorchEngine) -> None:
    expected = run(on_cpu)
    check(run(captured), expected)
    check(run(launched), expected)


def test_launches_with_penalties_and_log_probabilities_never_wait(captured: TorchEngine, launched: TorchEngine) -> None:
    flags = SlotFlag.IGNORE_EOS | SlotFlag.PENALTIES | SlotFlag.BIASES | SlotFlag.LOGPROBS
    penalties: dict[str, Any] = {"flags": flags, "presence": 1.0, "frequency": 1.0, "repetition": 1.2, "prompt_length": 4}
    for engine in (captured, launched):
        driver = driver_of(engine)
        driver.prefill(0, [5, 6, 7, 8], **penalties)
        plans = [
            driver.plan(decode_slots=int32s(0), decode_flags=int32s(1)),
            driver.plan(
                decode_slots=int32s(0),
                decode_flags=int32s(1),
                prefill_slots=int32s(1, 2),
                prefill_starts=int32s(0, 0),
                prefill_lengths=int32s(5, 3),
                prefill_flags=int32s(1, 3),
                prefill_ids=int32s(*range(3, 11)),
                grant_slots=int32s(1, 2),
                grant_indexes=int32s(0, 0),
                grant_pages=int32s(50, 51),
                bias_slots=int32s(1),
                bias_indexes=int32s(0),
                bias_ids=int32s(9),
                bias_values=np.array([100], dtype=np.float32).view(np.int32),
                admissions=np.concatenate([admission(slot, 40, **penalties) for slot in (1, 2)]),
            ),
        ]
        torch.cuda.synchronize()
        try:
            with warnings.catch_warnings(action="ignore"):  # that it does not see everything
                torch.cuda.set_sync_debug_mode("error")
            flights = [step_of(engine, plan).launch() for plan in plans]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [len(flight.ids()) for flight in flights] == [1, 3]
        assert flights[1].ids()[1] == 9
        assert [len(flight.logprobs()) for flight in flights] == [1, 3 + 2]


def test_counts_are_part_of_what_is_allocated_before_the_cache(checkpoint: Checkpoint) -> None:
    allowed = fraction_with(torch.cuda.mem_get_info()[0] // 2)
    engine = engine_of(checkpoint("qwen3"), num_pages=None, kv_cache_memory_bytes=None, memory_fraction=allowed, max_step_tokens=64)
    held = engine.penalties.held
    assert held.counts.shape == (SLOTS + 1, VOCAB_SIZE)
    assert held.listed.shape == (SLOTS + 1, min(VOCAB_SIZE, engine.max_length + 1))
    assert all(each.is_cuda for each in held)
    assert len(engine.token_ids) == engine.facts.pages * PAGE_SIZE
