"""The engine against transformers, and what a slot must and must not do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.driver import Driver, int32s, spec
from services.worker.engine.engine import TorchEngine
from shared.errors import ConfigError
from shared.protocol.plan import FAILED_ROW, NO_TOKEN
from tests.tiny import MAX_LENGTH, tiny_model

PAGE_SIZE = 4
EOS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(model: Path) -> TorchEngine:
    return TorchEngine(spec(model, page_size=PAGE_SIZE, num_pages=8 * 64 + 1), lambda phase, part: None)


@pytest.fixture
def driver(engine: TorchEngine) -> Driver:
    engine.reset()
    return Driver(engine, PAGE_SIZE, MAX_LENGTH // PAGE_SIZE)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng([length, seed]).integers(3, 300, length).tolist()
    return ids


def greedy_reference(reference: Any, ids: list[int], count: int) -> list[int]:
    ids = list(ids)
    for _ in range(count):
        ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-count:]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 17, 64, 200])
def test_greedy_tokens_equal_transformers(driver: Driver, reference: Any, length: int) -> None:
    ids = prompt(length)
    tokens = [driver.prefill(0, ids, flags=1), *(token for (token,) in driver.decode(0, iterations=11))]
    assert tokens == greedy_reference(reference, ids, 12)


@pytest.mark.parametrize("chunk", [1, 3, 4, 16])
def test_chunked_prefill_equals_one_pass(driver: Driver, chunk: int) -> None:
    ids = prompt(37)
    whole = [driver.prefill(0, ids, flags=1), *driver.decode(0, iterations=5)]
    chunked = [driver.prefill(1, ids, chunk=chunk, flags=1), *driver.decode(1, iterations=5)]
    assert chunked == whole


def test_sch_06_a_batch_does_not_change_answers(driver: Driver) -> None:
    prompts = [prompt(length) for length in (1, 5, 33, 120, 33)]
    alone = [[driver.prefill(7, ids, flags=1), *(token for (token,) in driver.decode(7, iterations=6))] for ids in prompts]
    first = [driver.prefill(slot, ids, flags=1) for slot, ids in enumerate(prompts)]
    together = driver.decode(*range(5), iterations=6)
    assert [[token, *(step[slot] for step in together)] for slot, token in enumerate(first)] == alone


def test_decodes_and_prefill_share_a_step(driver: Driver) -> None:
    first, second = prompt(9), prompt(6, seed=1)
    alone = [driver.prefill(0, first, flags=1), driver.decode(0)[0][0]]
    token = driver.prefill(1, second, flags=1)
    assert driver.prefill(2, first, flags=1) == alone[0]
    driver.prefill(3, [5], flags=1)
    mixed = driver.plan(
        decode_slots=int32s(2),
        decode_flags=int32s(1),
        prefill_slots=int32s(3),
        prefill_starts=int32s(0),
        prefill_lengths=int32s(6),
        prefill_flags=int32s(1),
        prefill_ids=int32s(*second),
    )
    assert driver.execute(mixed) == [[alone[1], token]]


def test_a_row_stops_itself_at_its_max_length(driver: Driver) -> None:
    driver.prefill(0, prompt(5), max_length=8, flags=1)
    assert [token >= 0 for (token,) in driver.decode(0, iterations=5)] == [True, True, False, False, False]
    assert int(driver.engine.slots.length[0]) == 7  # type: ignore[attr-defined]


def test_a_row_stops_itself_at_a_stop_id_also_when_eos_is_ignored(driver: Driver) -> None:
    first = driver.prefill(0, prompt(5), flags=1)
    tokens = [token for (token,) in driver.decode(0, iterations=8)]
    stop = next(token for token in tokens if token != first and token not in (first, EOS))
    expected = tokens[: tokens.index(stop) + 1]
    driver.prefill(0, prompt(5), flags=1, stop_ids=stop)
    assert [token for (token,) in driver.decode(0, iterations=8)] == expected + [NO_TOKEN] * (8 - len(expected))


def test_eos_ends_a_row_unless_ignored_and_never_below_the_least_length(driver: Driver) -> None:
    engine: TorchEngine = driver.engine  # type: ignore[assignment]
    before = engine.slots.eos_ids
    first = driver.prefill(0, prompt(5), flags=1)
    tokens = [token for (token,) in driver.decode(0, iterations=6)]
    eos = next(token for token in tokens if token != first)
    engine.slots.eos_ids = torch.tensor([eos, 299], dtype=torch.int32)
    try:
        driver.prefill(1, prompt(5))
        ended = [token for (token,) in driver.decode(1, iterations=6)]
        assert ended == tokens[: tokens.index(eos) + 1] + [NO_TOKEN] * (5 - tokens.index(eos))
        driver.prefill(2, prompt(5), min_length=9)
        assert not {eos, 299, NO_TOKEN} & {token for (token,) in driver.decode(2, iterations=3)}
    finally:
        engine.slots.eos_ids = before


def test_a_done_row_leaves_its_pages_alone(driver: Driver) -> None:
    engine: TorchEngine = driver.engine  # type: ignore[assignment]
    driver.prefill(0, prompt(5), max_length=6, flags=1)
    before = [cache.k[1:].clone() for cache in engine.caches]
    assert driver.decode(0, 0 + 1)[0] == [NO_TOKEN, NO_TOKEN]  # slot 1 was never admitted since the reset
    for cache, old in zip(engine.caches, before, strict=True):  # as bits: what was never written may be NaN
        assert torch.equal(cache.k[1:].view(torch.int32), old.view(torch.int32))


def test_a_released_row_is_done(driver: Driver) -> None:
    driver.prefill(0, prompt(5), flags=1)
    driver.execute(driver.plan(release_slots=int32s(0)))
    assert driver.decode(0) == [[NO_TOKEN]]


def test_admission_resets_the_slot(driver: Driver) -> None:
    tokens = [driver.prefill(0, prompt(5), flags=1), *driver.decode(0, iterations=3)]
    driver.prefill(0, prompt(50, seed=3), max_length=51, stop_ids=9, temperature=1.0, seed_low=5)
    assert [driver.prefill(0, prompt(5), flags=1), *driver.decode(0, iterations=3)] == tokens


def test_pages_of_the_slot_before_are_not_read(driver: Driver) -> None:
    engine: TorchEngine = driver.engine  # type: ignore[assignment]
    expected = [driver.prefill(0, prompt(6), flags=1), *driver.decode(0, iterations=4)]
    for cache in engine.caches:
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
    assert [driver.prefill(0, prompt(6), flags=1), *driver.decode(0, iterations=4)] == expected


def test_a_row_that_is_not_finite_fails_alone(driver: Driver) -> None:
    engine: TorchEngine = driver.engine  # type: ignore[assignment]
    expected = [driver.prefill(0, prompt(6), flags=1), *(token for (token,) in driver.decode(0, iterations=2))]
    driver.prefill(0, prompt(6), flags=1)
    driver.prefill(1, prompt(7), flags=1)
    engine.caches[0].k[1 + 1] = float("nan")  # the first page of slot 1
    assert driver.decode(0, 1, iterations=2) == [[expected[1], FAILED_ROW], [expected[2], NO_TOKEN]]


def test_seeded_sampling_depends_on_seed_and_position_only(driver: Driver) -> None:
    def run(slot: int, seed: int, others: tuple[int, ...] = ()) -> list[int]:
        first = driver.prefill(slot, prompt(8), flags=1, temperature=1.0, seed_low=seed)
        return [first, *(step[0] for step in driver.decode(slot, *others, iterations=6))]

    alone = run(0, seed=7)
    driver.prefill(1, prompt(3), flags=1, temperature=2.0, seed_low=1)
    assert run(4, seed=7, others=(1,)) == alone
    assert run(4, seed=8) != alone
    resumed = driver.prefill(5, prompt(8) + alone[:3], flags=1, temperature=1.0, seed_low=7)
    assert [resumed, *(token for (token,) in driver.decode(5, iterations=3))] == alone[3:]


def test_a_negative_seed_is_a_seed(driver: Driver) -> None:
    tokens = driver.prefill(0, prompt(8), temperature=1.0, seed_low=2**32 - 5, seed_high=2**32 - 1)
    assert int(driver.engine.slots.seed[0]) == -5  # type: ignore[attr-defined]
    assert tokens >= 0


def test_a_context_beyond_the_models_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len: 257 is more than the model's 256"):
        TorchEngine(spec(model, max_model_len=257), lambda phase, part: None)


def test_a_cache_without_room_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        TorchEngine(spec(model, num_pages=None, kv_cache_memory_bytes=1000), lambda phase, part: None)
