"""The engine on a GPU: what is captured computes what is launched, ahead and without waiting, and how many launches a layer takes."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.driver import Driver, admission, int32s, spec
from kernels.decode_splits import config
from kernels.tuning import tables
from services.worker.engine.engine import TorchEngine
from services.worker.engine.features import VARIANTS, Feature
from services.worker.engine.interface import Step
from services.worker.engine.sections import decode_sections
from shared.protocol.plan import NO_TOKEN, Plan, decode, encode
from tests.services.worker.models.checkpoints import MAX_LENGTH, llama, make, qwen3_moe

PAGE_SIZE, SLOTS = 16, 8
SLEEP_CYCLES = 10**8  # of the device: about 50 ms
LONG = 1 << 18  # positions: all slots together could use more KV cache than MOST_BYTES
MOST_BYTES = 24 << 30
Checkpoint = Callable[[str], Path]


def engine_of(folder: Path, **changes: Any) -> TorchEngine:
    values: dict[str, Any] = {"device": "cuda", "dtype": "float32", "slots": SLOTS, "page_size": PAGE_SIZE, "max_model_len": MAX_LENGTH}
    return TorchEngine(spec(folder, **{**values, "num_pages": SLOTS * MAX_LENGTH // PAGE_SIZE + 1, **changes}), lambda phase, part: None)


def driver_of(engine: TorchEngine) -> Driver:
    engine.reset()
    return Driver(engine, PAGE_SIZE, MAX_LENGTH // PAGE_SIZE)


def prompt(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng([length, seed]).integers(3, 257, length).tolist()
    return ids


@pytest.fixture(scope="module")
def captured(checkpoint: Checkpoint) -> TorchEngine:
    return engine_of(checkpoint("qwen3"))


@pytest.fixture(scope="module")
def launched(checkpoint: Checkpoint) -> TorchEngine:
    return engine_of(checkpoint("qwen3"), cuda_graphs=False)


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed_low": 7},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed_low": 3},
    "least length": {"min_length": 60, "flags": 0, "stop_ids": (5, 9)},
}


def generate(engine: TorchEngine, samplings: list[dict[str, Any]], bursts: tuple[int, ...]) -> list[list[int]]:
    """Tokens `[rows][iterations]` of one row for each sampling, decoded together."""
    driver, rows = driver_of(engine), range(len(samplings))
    tokens = [[driver.prefill(row, prompt(20 + row), **{"flags": 1, **samplings[row]})] for row in rows]
    for iterations in bursts:
        for step in driver.decode(*rows, iterations=iterations):
            for row in rows:
                tokens[row].append(step[row])
    return tokens


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_captured_steps_give_the_tokens_of_launched_ones(captured: TorchEngine, launched: TorchEngine, kind: str, rows: int) -> None:
    samplings = [SAMPLINGS[kind]] * rows
    assert generate(captured, samplings, (1, 8, 8)) == generate(launched, samplings, (1, 8, 8))


def test_a_row_gets_the_same_token_beside_rows_that_ask_for_more(captured: TorchEngine) -> None:
    alone = [generate(captured, [sampling], (8,))[0] for sampling in SAMPLINGS.values()]
    # Rows begin with other prompts by their place, so each stands at its place among copies of itself.
    for row, sampling in enumerate(SAMPLINGS.values()):
        mixed = list(SAMPLINGS.values())
        mixed[0], mixed[row] = sampling, mixed[0]
        assert generate(captured, mixed, (8,))[0] == alone[row]


def step_of(engine: TorchEngine, plan: Plan) -> Step:
    words = np.frombuffer(bytearray(encode(plan)), dtype=np.int32)
    return engine.begin(decode(words.data.cast("B")), words)


def test_a_burst_goes_on_after_a_plan_that_jumped_into_it(captured: TorchEngine) -> None:
    expected = generate(captured, [{}, {}], (6,))
    driver = driver_of(captured)
    for row in (0, 1):
        driver.prefill(row, prompt(20 + row), flags=1)
    burst = step_of(captured, driver.plan(decode_slots=int32s(0, 1), decode_flags=int32s(1, 1), iterations=6))
    first = [burst.launch() for _ in range(2)]
    tokens = [each.ids().tolist() for each in first]
    assert driver.prefill(2, prompt(30), flags=1) >= 0
    for _ in range(2):
        ahead = [burst.launch() for _ in range(2)]
        tokens += [each.ids().tolist() for each in ahead]
    assert [list(row) for row in zip(*tokens, strict=True)] == [row[1:] for row in expected]


def test_launches_never_wait_for_the_device(captured: TorchEngine, launched: TorchEngine) -> None:
    for engine in (captured, launched):
        driver = driver_of(engine)
        driver.prefill(0, prompt(9), flags=1, temperature=1.0, top_p=0.5, min_length=30)
        plans = [
            driver.plan(decode_slots=int32s(0), decode_flags=int32s(1)),
            driver.plan(
                decode_slots=int32s(0),
                decode_flags=int32s(1),
                prefill_slots=int32s(1, 2),
                prefill_starts=int32s(0, 0),
                prefill_lengths=int32s(5, 3),
                prefill_flags=int32s(1, 0),
                prefill_ids=int32s(*range(3, 11)),
                grant_slots=int32s(1, 2),
                grant_indexes=int32s(0, 0),
                grant_pages=int32s(50, 51),
                release_slots=int32s(3),
                admissions=np.concatenate([admission(1, 40), admission(2, 40, temperature=0.5)]),
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
        assert flights[1].ids()[2] == NO_TOKEN
        assert all(flight.landed() for flight in flights)


# Qwen3-0.6B's layer: where the GPU has a table, its products run.
SHAPE = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
LAUNCHES = {"dense": 9, "moe": 13}


@pytest.mark.parametrize("kind", LAUNCHES)
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_launches_of_a_decode_layer(tmp_path: Path, kind: str, rows: int) -> None:
    def kernels(layers: int) -> list[str]:
        make_model = llama if kind == "dense" else qwen3_moe
        folder = make(make_model(**SHAPE, num_hidden_layers=layers), tmp_path / f"{layers}")
        engine = engine_of(folder, dtype="bfloat16", cuda_graphs=False, num_pages=65 * MAX_LENGTH // PAGE_SIZE, slots=64)
        slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        engine.step(decode_sections(slots), 0, VARIANTS[0])
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            engine.step(decode_sections(slots), 0, VARIANTS[0])
            torch.cuda.synchronize()
        return [event.name for event in profiler.events() if event.device_type.name == "CUDA"]

    two, four = kernels(2), kernels(4)
    a_layer = (len(four) - len(two)) / 2
    print(f"{kind}, {rows} rows: {a_layer} launches a layer, {len(two) - 2 * a_layer} beside; " + ", ".join(sorted(set(four))))
    norms_in_products = kind == "dense" and rows == 1 and tables(torch.device("cuda", 0))
    rotates_within = config(torch.device("cuda", 0), torch.bfloat16, rows, 16, 8, 128, MAX_LENGTH).rotates
    assert a_layer <= (6 if norms_in_products else LAUNCHES[kind]) - rotates_within


@pytest.mark.parametrize("rows", [1, SLOTS])
@pytest.mark.parametrize("features", VARIANTS)
def test_every_variant_of_a_decode_step_is_captured(captured: TorchEngine, features: Feature, rows: int) -> None:
    driver, slots = driver_of(captured), int32s(*range(rows))
    step_of(captured, driver.plan(decode_slots=slots, decode_flags=np.ones_like(slots)))
    assert captured.graphs is not None
    result = captured.graphs.replay(driver.plan(decode_slots=slots, decode_flags=np.ones_like(slots)), features)
    assert result is not None
    assert len(result) == rows


def test_plans_that_are_staged_far_ahead_of_the_device_arrive_as_they_are(captured: TorchEngine) -> None:
    driver = driver_of(captured)
    plans = [driver.plan(decode_slots=int32s(*[slot] * 3), decode_flags=int32s(1, 1, 1)) for slot in range(6)]
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    arrived = []
    for plan in plans:
        step_of(captured, plan)
        assert captured.staging is not None
        arrived.append(captured.staging.decode_slots[:3].clone())  # in stream order: before the next plan takes its place
    assert [each.tolist() for each in arrived] == [[slot] * 3 for slot in range(6)]


def fraction_with(allowed: int) -> float:
    """The memory_fraction that allows so many bytes more than the GPU's processes have now, so that others may run beside a test."""
    free, total = torch.cuda.mem_get_info()
    return (total - free + allowed) / total


def test_the_cache_takes_what_memory_fraction_leaves(tmp_path: Path) -> None:
    """And no more, with the captured steps in it."""
    shape = {**SHAPE, "num_key_value_heads": 16, "num_hidden_layers": 2, "max_position_embeddings": LONG}
    model = make(llama(**shape), tmp_path / "model")
    torch.cuda.empty_cache()
    reserved, allowed = torch.cuda.memory_reserved(), min(MOST_BYTES, torch.cuda.mem_get_info()[0] // 2)
    unset = {"num_pages": None, "kv_cache_memory_bytes": None, "memory_fraction": fraction_with(allowed)}
    engine = engine_of(model, dtype="bfloat16", max_model_len=LONG, max_step_tokens=256, **unset)
    assert engine.facts.pages < SLOTS * LONG // PAGE_SIZE  # by memory, not by what the slots could use
    assert engine.memory.kv_cache > allowed // 16  # less than all of it where others take memory at the same time
    assert torch.cuda.memory_reserved() - reserved <= allowed
