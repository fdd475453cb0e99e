"""What tensor parallelism must not change, and what it refuses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.errors import ConfigError
from shared.protocol.plan import SlotFlag
from tests.services.worker.models.checkpoints import llama, make, qwen3, qwen3_moe
from tests.services.worker.models.group import Group, Job, Local
from tests.services.worker.models.reference import NEAR_TIE, TOLERANCE, logits

Checkpoint = Callable[[str], Path]
Groups = Callable[[int], Group | Local]


def prompts(count: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    generator = np.random.default_rng(seed)
    return tuple(tuple(generator.integers(3, 257, length).tolist()) for length in generator.integers(1, 120, count))


@pytest.mark.parametrize("ranks", [2, 4])
def test_tp_01_more_ranks_equal_one(checkpoint: Checkpoint, group: Groups, ranks: int) -> None:
    folder, asked = checkpoint("qwen2"), prompts(20)
    start = 0
    for number, size in enumerate((1, 2, 5, 5, 7)):  # batch sizes
        job = Job(folder, asked[start : start + size], 8, chunk=(1000, 33)[number % 2])
        (alone,), (together, *_) = group(1).run(job), group(ranks).run(job)
        start += size
        for prompt, one, many in zip(job.prompts, alone.tokens, together.tokens, strict=True):
            first = next((index for index in range(job.count) if one[index] != many[index]), None)
            if first is not None:  # a near tie, or a fault
                best = np.sort(logits(folder, (*prompt, *one[:first].tolist()))[-1])
                assert best[-1] - best[-2] < NEAR_TIE
        if (alone.tokens == together.tokens).all():
            np.testing.assert_allclose(together.logits, alone.logits, rtol=0, atol=TOLERANCE)
    assert start == len(asked)


@pytest.mark.parametrize("gather", ["full", "best", "candidates"])
def test_penalties_and_log_probabilities_are_the_same_on_every_rank(checkpoint: Checkpoint, group: Groups, gather: str) -> None:
    flags = SlotFlag.IGNORE_EOS | SlotFlag.PENALTIES | SlotFlag.LOGPROBS
    sampling = {"flags": flags, "presence": 1.5, "frequency": 0.5, "repetition": 1.4, "prompt_length": 20, "temperature": 0.8, "top_k": 40}
    job = Job(checkpoint("qwen2"), prompts(4), 8, sampling=sampling)
    (alone,), together = group(1).run(job), group(2).run(replace(job, spec={"sampling_gather": gather}))
    for rank in together:
        np.testing.assert_array_equal(rank.tokens, alone.tokens)
        for name in ("row", "position", "top_ids"):
            np.testing.assert_array_equal(rank.logprobs[name], alone.logprobs[name])
        for name in ("logprob", "top_logprobs"):
            np.testing.assert_allclose(rank.logprobs[name], alone.logprobs[name], rtol=0, atol=TOLERANCE)
    assert len(alone.logprobs) == alone.tokens.size


@pytest.fixture
def biased(tmp_path: Path) -> Path:
    """A model whose row-parallel biases are large."""
    torch.manual_seed(0)
    model = llama(attention_bias=True, mlp_bias=True)
    folder = make(model, tmp_path / "biased")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.bias", "down_proj.bias")):
                parameter.fill_(3.0).add_(torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tp_02_row_parallel_bias_is_added_once(biased: Path, group: Groups, ranks: int) -> None:
    asked = prompts(2)
    outcome, *_ = group(ranks).run(Job(biased, asked))
    for prompt, ours in zip(asked, outcome.logits, strict=True):
        np.testing.assert_allclose(ours[0], logits(biased, prompt)[-1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kv_heads, ranks", [(2, 4), (1, 2), (1, 4)])
def test_tp_04_fewer_kv_heads_than_ranks(tmp_path: Path, group: Groups, kv_heads: int, ranks: int) -> None:
    torch.manual_seed(0)
    folder, asked = make(qwen3(num_key_value_heads=kv_heads), tmp_path / "model"), prompts(3)
    outcome, *_ = group(ranks).run(Job(folder, asked, 3))
    for prompt, tokens, ours in zip(asked, outcome.tokens.tolist(), outcome.logits, strict=True):
        np.testing.assert_allclose(ours, logits(folder, (*prompt, *tokens[:-1]))[len(prompt) - 1 :], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "ranks, shape, told",
    [
        (2, {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}, "2 ranks do not divide 3 query heads"),
        (2, {"intermediate_size": 97}, "2 ranks do not divide 97 intermediate dimensions"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96}, "4 ranks neither divide nor replicate 6 KV heads"),
    ],
)
def test_tp_04_what_does_not_fit_is_refused(tmp_path: Path, group: Groups, ranks: int, shape: dict[str, int], told: str) -> None:
    folder = make(llama(**shape), tmp_path / "odd")
    with pytest.raises(ConfigError, match=f"^tensor_parallel_size: {told}$"):
        group(ranks).run(Job(folder, prompts(1)))


def test_experts_that_do_not_divide_are_refused(tmp_path: Path, group: Groups) -> None:
    folder = make(qwen3_moe(moe_intermediate_size=13), tmp_path / "odd")
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size: 2 ranks do not divide 13 expert intermediate dimensions$"):
        group(2).run(Job(folder, prompts(1)))


@pytest.mark.parametrize("vocab_size", [3, 5, 258])
def test_ranks_without_a_share_of_the_vocabulary(tmp_path: Path, group: Groups, vocab_size: int) -> None:
    torch.manual_seed(0)
    folder = make(llama(vocab_size=vocab_size, eos_token_id=None, bos_token_id=None), tmp_path / "small")
    asked = ((0, 1, 2), (1,))
    outcome, *_ = group(4).run(Job(folder, asked, 4, sampling={"temperature": 1.0}))
    assert outcome.logits.shape[-1] == vocab_size
    assert outcome.tokens.max() < vocab_size
    np.testing.assert_allclose(outcome.logits[0, 0], logits(folder, asked[0])[-1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("ranks, count", [(2, 200), (4, 60)])
def test_tp_05_all_ranks_pick_the_same_tokens(checkpoint: Checkpoint, group: Groups, ranks: int, count: int) -> None:
    job = Job(checkpoint("llama"), prompts(8), count, sampling={"temperature": 1.0})
    first, *others = group(ranks).run(job)
    assert all((other.tokens == first.tokens).all() for other in others)
    assert len({tuple(tokens) for tokens in first.tokens.tolist()}) == 8
    assert (first.tokens >= 0).all()
