"""The real services around a rank on the GPU: what is captured, cached or spread over ranks changes no token, and nothing is lost when
pages run out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.local import LLM, Completion, Sampling
from tests.gpu.test_models import NEAR_TIE, reference_logits
from tests.tiny import tiny_model

PAGE_SIZE, MAX_LENGTH = 16, 2048
SETTINGS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "page_size": PAGE_SIZE, "max_num_seqs": 64, "progress": False}
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "no graphs": {"cuda_graphs": False},
    "two ranks": {"tensor_parallel_size": 2, "ranks_per_gpu": 2, "cuda_graphs": False},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=MAX_LENGTH)


def prompts(count: int, length: int, shared: int = 0) -> list[list[int]]:
    generator = np.random.default_rng([count, length, shared])
    beginning = generator.integers(3, 257, shared).tolist()
    return [beginning + generator.integers(3, 257, length - shared).tolist() for _ in range(count)]


def check_equal(model: Path, ours: Sequence[Completion], theirs: Sequence[Completion]) -> None:
    """The same tokens, up to the first place where the two likeliest are as good as equal."""
    for one, other in zip(ours, theirs, strict=True):
        assert len(one.ids) == len(other.ids)
        differ = np.flatnonzero(one.ids != other.ids)
        if len(differ):
            before = (*one.prompt_ids.tolist(), *one.ids[: differ[0]].tolist())
            best = np.sort(reference_logits(model, before)[-1])
            assert best[-1] - best[-2] < NEAR_TIE


@pytest.fixture(scope="module")
def plain(model: Path) -> list[Completion]:
    """Without graphs and cached prefixes, on one rank."""
    with LLM(model, **{**SETTINGS, **WAYS["no graphs"]}, num_pages=4000) as llm:
        asked = prompts(40, 100, shared=64)
        return llm.generate(asked, [Sampling(24, ignore_eos=True, temperature=0, cache_salt=str(row)) for row in range(len(asked))])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_tokens_with_graphs_with_cached_prefixes_and_on_two_ranks(model: Path, plain: list[Completion], way: str) -> None:
    asked = prompts(40, 100, shared=64)
    with LLM(model, **{**SETTINGS, **WAYS[way]}, num_pages=4000) as llm:
        first = llm.generate(asked, Sampling(24, ignore_eos=True, temperature=0))
        again = llm.generate(asked, Sampling(24, ignore_eos=True, temperature=0))
        seeded = [llm.generate(asked[:8], Sampling(24, ignore_eos=True, temperature=0.8, top_k=40, seed=7)) for _ in range(2)]
    assert all(each.cached_tokens >= 64 for each in again)
    check_equal(model, first, plain)
    check_equal(model, again, plain)
    assert len({tuple(each.ids.tolist()) for each in seeded[0]}) > 1


def preemptions(llm: LLM) -> float:
    """So far."""
    text = httpx.get(f"http://127.0.0.1:{llm.admin_ports['scheduler']}/metrics", trust_env=False).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == "lockstep_num_preemptions_total")


@pytest.mark.timeout(300)
def test_everything_completes_when_pages_are_short(model: Path) -> None:
    """85,000 tokens of KV cache, of which 128 prompts alone would take 131,072."""
    asked = prompts(128, 1024)
    with LLM(model, **{**SETTINGS, "max_num_seqs": 128}, num_pages=85_000 // PAGE_SIZE, max_step_tokens=4096) as llm:
        answers = llm.generate(asked, Sampling(200, ignore_eos=True, temperature=0))
        assert preemptions(llm) > 0
        alone = llm.generate(asked[:3], Sampling(200, ignore_eos=True, temperature=0))
    assert all(len(answer.ids) == 200 and answer.finish_reason == "length" for answer in answers)
    check_equal(model, answers[:3], alone)
