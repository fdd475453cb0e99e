"""Every family on the GPU against transformers there: in float32 closely, in bfloat16 as closely as bfloat16 can be."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig

from tests.services.worker.models.checkpoints import MAKERS, MAX_LENGTH, VOCAB_SIZE, make, qwen3
from tests.services.worker.models.group import Group, Job, Local, Outcome

TOLERANCE = 1e-3  # of float32 logits, absolute
RELATIVE = 2e-2  # of bfloat16 logits: a token's error vector to its logits; and how near candidates are, to the largest logit
NEAR_TIE = 1e-3  # float32 logits closer than this may change places

# As wide as Qwen3-0.6B, whose products the tables have.
TUNED = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "initializer_range": 0.02,
}

Checkpoint = Callable[[str], Path]


def prompts(*lengths: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(np.random.default_rng([length, row]).integers(3, VOCAB_SIZE, length).tolist()) for row, length in enumerate(lengths))


SHORT_AND_LONG = prompts(1, 2, 17, 64, 300)


def spec(**changes: Any) -> dict[str, Any]:
    return {"device": "cuda", "max_model_len": MAX_LENGTH, "cuda_graphs": False, "dtype": "float32", **changes}


@cache
def reference(folder: Path) -> Any:
    (architecture,) = AutoConfig.from_pretrained(folder).architectures
    model: Any = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.cuda().eval()


def reference_logits(folder: Path, ids: tuple[int, ...]) -> np.ndarray:
    """`[tokens, V]` of transformers, on the GPU in float32."""
    with torch.no_grad():
        values: np.ndarray = reference(folder)(torch.tensor([ids], device="cuda")).logits[0].cpu().numpy()
    return values


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Group | Local]]:
    """One rank in this process, or two that share the GPU."""
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    groups: dict[int, Group | Local] = {}

    def start(size: int) -> Group | Local:
        if size not in groups:
            groups[size] = Local() if size == 1 else Group(size, tmp_path_factory.mktemp("group"), "cuda")
        return groups[size]

    yield start
    for each in groups.values():
        each.close()


def steps(folder: Path, asked: tuple[tuple[int, ...], ...], outcome: Outcome) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each token with our logits and transformers' for what stands before it."""
    for prompt, tokens, ours in zip(asked, outcome.tokens.tolist(), outcome.logits, strict=True):
        yield from zip(tokens, ours, reference_logits(folder, (*prompt, *tokens[:-1]))[len(prompt) - 1 :], strict=True)


def check_float32(folder: Path, asked: tuple[tuple[int, ...], ...], outcome: Outcome) -> None:
    for token, ours, theirs in steps(folder, asked, outcome):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
        assert token == theirs.argmax() or theirs.max() - theirs[token] < NEAR_TIE


def check_bfloat16(folder: Path, asked: tuple[tuple[int, ...], ...], outcome: Outcome, name: str) -> None:
    worst = 0.0
    for token, ours, theirs in steps(folder, asked, outcome):
        worst = max(worst, float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)))
        assert theirs.max() - theirs[token] <= RELATIVE * np.abs(theirs).max()
    print(f"{name}: relative error of bfloat16 logits {worst:.1e}")
    assert worst < RELATIVE


@pytest.mark.parametrize("name", MAKERS)
def test_float32_logits_and_greedy_tokens_equal_transformers(checkpoint: Checkpoint, ranks: Any, name: str) -> None:
    for asked, count, chunk in ((SHORT_AND_LONG, 32, 1000), (prompts(300, 31), 2, 16)):
        (outcome,) = ranks(1).run(Job(checkpoint(name), asked, count, chunk, spec=spec()))
        check_float32(checkpoint(name), asked, outcome)


@pytest.mark.parametrize("name", MAKERS)
def test_bfloat16_logits_are_near_and_the_best_token_is_the_same(smooth_checkpoint: Checkpoint, ranks: Any, name: str) -> None:
    folder = smooth_checkpoint(name)
    (outcome,) = ranks(1).run(Job(folder, SHORT_AND_LONG, 16, spec=spec(dtype="bfloat16")))
    check_bfloat16(folder, SHORT_AND_LONG, outcome, name)


@pytest.mark.parametrize("lengths", [(9,), (3, 9, 5, 20, 1)])
def test_bfloat16_logits_by_products_of_the_table_are_near(tmp_path: Path, ranks: Any, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    make(qwen3(**TUNED).bfloat16(), tmp_path / "model")
    asked = prompts(*lengths)
    (outcome,) = ranks(1).run(Job(tmp_path / "model", asked, 8, spec=spec(dtype="bfloat16")))
    check_bfloat16(tmp_path / "model", asked, outcome, f"{len(asked)} rows of tuned products")


@pytest.mark.parametrize("name", ["llama-biased", "qwen2", "qwen3", "qwen3-moe", "mistral", "mistral3", "ministral3"])
def test_two_ranks_on_one_gpu_equal_transformers(checkpoint: Checkpoint, ranks: Any, name: str) -> None:
    asked = prompts(1, 33, 150)
    outcome, other = ranks(2).run(Job(checkpoint(name), asked, 8, spec=spec(ranks_per_gpu=2)))
    assert (outcome.tokens == other.tokens).all()
    check_float32(checkpoint(name), asked, outcome)
