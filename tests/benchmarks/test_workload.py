"""The workload is the one that other engines were measured with, and the floors are those that their figures were compared with."""

import json

import pytest

from benchmarks.ceilings import Ceilings
from benchmarks.floors import decode_step_s, offline_s, prefill_operations
from benchmarks.peers import PEERS
from benchmarks.workload import HIGHEST_ID, config_file, fresh, offline_task
from services.worker.engine.roofline import Shape
from services.worker.models.registry import describe
from shared.errors import ConfigError

H200 = Ceilings(read=4.55e12, matrix=774e12, sustained=659e12)


def shape(name: str) -> Shape:
    return Shape.from_config(json.loads(config_file(name).read_text()))


def test_the_offline_task_is_drawn_as_by_others() -> None:
    task, again = offline_task(), offline_task(run=1)
    assert (task.prompt_tokens, task.output_tokens) == (142_827, 133_966)
    assert max(map(max, task.prompts)) <= HIGHEST_ID
    assert again.max_tokens == task.max_tokens
    assert list(map(len, again.prompts)) == list(map(len, task.prompts))
    assert not {tuple(prompt) for prompt in again.prompts} & {tuple(prompt) for prompt in task.prompts}


def test_ids_stay_within_a_small_vocabulary() -> None:
    assert max(map(max, offline_task(vocab_size=100, least=5, most=50).prompts)) == 99
    assert max(map(max, fresh([1000], 100, seed=1))) == 99


@pytest.mark.parametrize("name", PEERS)
def test_every_shape_is_one_of_our_families_and_has_no_unknown_field(name: str) -> None:
    _, _, remarks = describe(json.loads(config_file(name).read_text()), frozenset())
    assert not remarks


def test_what_is_neither_shape_nor_folder_is_told() -> None:
    with pytest.raises(ConfigError, match=r"nope is neither a shape \(Llama-3.1-8B, Qwen3-0.6B"):
        config_file("nope")


@pytest.mark.parametrize(
    "name, step_ms, tokens_per_s",
    [
        ("Qwen3-0.6B", {1: 0.29, 8: 0.48, 256: 7.28}, 38_071),
        ("Llama-3.1-8B", {1: 3.33, 8: 3.55, 256: 11.32}, 13_632),
        ("Qwen3-14B", {1: 6.19, 8: 6.46, 256: 16.18}, 8_246),
        ("Qwen3-30B-A3B", {1: 1.36, 8: 5.87, 256: 19.30}, 8_101),
    ],
)
def test_floors_are_those_of_the_published_comparison(name: str, step_ms: dict[int, float], tokens_per_s: float) -> None:
    for rows, expected in step_ms.items():
        assert 1e3 * decode_step_s(shape(name), rows, 1088, H200) == pytest.approx(expected, abs=0.011)
    task = offline_task()
    assert task.output_tokens / offline_s(shape(name), task, H200) == pytest.approx(tokens_per_s, rel=1e-3)


def test_prefill_counts_linears_attention_and_the_head_of_last_tokens() -> None:
    model = shape("Qwen3-0.6B")
    linears = 28 * (1024 * 128 * (2 * 16 + 2 * 8) + 3 * 1024 * 3072)
    expected = 2 * linears * 20 + 2 * 2 * 151_936 * 1024 + 2 * 28 * 16 * 128 * (5**2 + 15**2)
    assert prefill_operations(model, [5, 15]) == expected
