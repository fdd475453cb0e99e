"""Rows of nobody, which fill up captured steps, change neither the others' tokens nor anybody's state."""

import pytest
import torch

from benchmarks.driver import Driver, spec
from services.worker.engine.engine import TorchEngine
from services.worker.engine.features import NO_FEATURES, VARIANTS, Feature
from services.worker.engine.sections import decode_sections, row_sections
from tests.tiny import MAX_LENGTH, tiny_model

PAGE_SIZE = 4
MISSING = MAX_LENGTH + 40  # prompt tokens of nobody: more than a slot has positions for


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    model = tiny_model(tmp_path_factory.mktemp("tiny"))
    return TorchEngine(spec(model, device="cpu", page_size=PAGE_SIZE, num_pages=8 * 64 + 1), lambda phase, part: None)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def begin(engine: TorchEngine) -> Driver:
    """Slots 0 and 1 have their first token, 2 and 3 are admitted and have pages."""
    engine.reset()
    driver = Driver(engine, PAGE_SIZE, MAX_LENGTH // PAGE_SIZE)
    for slot in range(4):
        driver.prefill(slot, list(range(10 + slot, 20 + slot)), flags=1)
    return driver


@pytest.mark.parametrize("features", VARIANTS)
def test_a_decode_batch_is_filled_up(engine: TorchEngine, features: Feature) -> None:
    nobody = engine.slots.padding
    begin(engine)
    expected = [engine.step(decode_sections(ints(0, 1)), 0, NO_FEATURES) for _ in range(3)]
    length = engine.slots.length.clone()
    begin(engine)
    filled = [engine.step(decode_sections(ints(0, 1, nobody, nobody)), 0, features) for _ in range(3)]
    for few, many in zip(expected, filled, strict=True):
        ids = many if many.dim() == 1 else many[:, 0]
        assert torch.equal(ids[:2], few)
        assert ids[2:].tolist() == [-1, -1]
    assert torch.equal(engine.slots.length, length)
    assert bool(engine.slots.done[nobody])


@pytest.mark.parametrize("decodes", [(), (0, 1)])
def test_a_mixed_batch_is_filled_up(engine: TorchEngine, decodes: tuple[int, ...]) -> None:
    nobody, prompt = engine.slots.padding, [*range(30, 37), *range(40, 42)]
    begin(engine)
    rows = row_sections(ints(*decodes), ints(2, 3), ints(0, 3), ints(7, 2), ints(*prompt))
    expected = engine.step(rows, 7, NO_FEATURES)
    state = engine.slots.length.clone(), engine.slots.last_token.clone()
    begin(engine)
    filled = row_sections(
        ints(*decodes, *[nobody] * (4 - len(decodes))),
        ints(2, 3, *[nobody] * 3),
        ints(0, 3, 0, 0, 0),
        ints(7, 2, MISSING, 0, 0),
        ints(*prompt, *[0] * MISSING),
    )
    result = engine.step(filled, MISSING, NO_FEATURES)
    assert torch.equal(torch.cat((result[: len(decodes)], result[4:6])), expected)
    assert result[len(decodes) : 4].tolist() == [-1] * (4 - len(decodes))
    assert torch.equal(engine.slots.length, state[0])
    assert torch.equal(engine.slots.last_token[:4], state[1][:4])
