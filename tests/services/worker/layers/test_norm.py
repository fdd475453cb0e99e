"""Norms that the products around them make, wherever that may be."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from services.worker.layers import norm
from tests.services.worker.models.group import Job, Local
from tests.services.worker.models.reference import check

Checkpoint = Callable[[str], Path]
PROMPTS, STEPS = ((3, 4, 5, 6, 7, 8, 9), (7,)), 2
# In a step: behind attention, but for the layer of experts, and behind each MLP, but for the last layer's.
BEGUN = {"llama-biased": 3, "qwen3-moe-dense-layers": 5}


@pytest.mark.parametrize("name", BEGUN)
def test_logits_equal_transformers(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    begun: list[tuple[Tensor | bool, ...]] = []

    def always(*products: Tensor | bool) -> bool:
        begun.append(products)
        return True

    monkeypatch.setattr(norm, "begins_norm", always)
    folder = checkpoint(name)
    check(folder, PROMPTS, Local().run(Job(folder, PROMPTS, STEPS))[0])
    assert len(begun) == STEPS * BEGUN[name]
