"""What transformers computes for the tiny checkpoints."""

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from tests.services.worker.models.group import Outcome

NEAR_TIE = 1e-3  # two best logits closer than this may change places
TOLERANCE = 1e-4


@cache
def reference(folder: Path) -> PreTrainedModel:
    (architecture,) = AutoConfig.from_pretrained(folder).architectures
    model: PreTrainedModel = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model


@cache
def logits(folder: Path, ids: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """`[tokens, V]`."""
    with torch.no_grad():
        values: npt.NDArray[np.float32] = reference(folder)(torch.tensor([ids])).logits[0].numpy()
    return values


def check(folder: Path, prompts: tuple[tuple[int, ...], ...], outcome: Outcome) -> None:
    """Every token's logits within TOLERANCE of transformers' for the same tokens before it, and the token its best but for near ties."""
    for prompt, tokens, ours in zip(prompts, outcome.tokens.tolist(), outcome.logits, strict=True):
        theirs = logits(folder, (*prompt, *tokens[:-1]))[len(prompt) - 1 :]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
        for token, values in zip(tokens, theirs, strict=True):
            assert token == values.argmax() or values.max() - values[token] < NEAR_TIE
