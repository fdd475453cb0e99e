"""Every family and variant of its config against transformers, at every number of ranks."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.services.worker.models.checkpoints import MAKERS, MAX_LENGTH, ROPE_ONLY, VOCAB_SIZE
from tests.services.worker.models.group import Group, Job, Local
from tests.services.worker.models.reference import check


def prompts(*lengths: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(np.random.default_rng([length, row]).integers(3, VOCAB_SIZE, length).tolist()) for row, length in enumerate(lengths))


Checkpoint = Callable[[str], Path]
Groups = Callable[[int], Group | Local]


@pytest.mark.parametrize("name, ranks", [(name, ranks) for ranks in (1, 2, 4) for name in MAKERS if ranks == 1 or name not in ROPE_ONLY])
def test_logits_and_greedy_tokens_equal_transformers(checkpoint: Checkpoint, group: Groups, name: str, ranks: int) -> None:
    folder, slow = checkpoint(name), ranks > 1  # a step of several processes takes long where they outnumber the cores
    for asked, count, chunk in (
        (prompts(1, 2, 17, 64, 300), 32, 1000),
        (prompts(50 if slow else 300, 31), 2, 16),
        (prompts(9 if slow else 300, 7), 2, 1),
    ):
        # No more context than the model's own: dynamic NTK, made for a longer one, would rotate otherwise from the first token on.
        outcome, *others = group(ranks).run(Job(folder, asked, count, chunk, spec={"max_model_len": MAX_LENGTH}))
        check(folder, asked, outcome)
        assert all((other.tokens == outcome.tokens).all() for other in others)
