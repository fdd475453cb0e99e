"""Tables of rotary embeddings against transformers', at positions where float32 shows."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.worker.layers.rotary import attention_factor, frequencies, query_scale, rotary_table
from services.worker.models.rope import AnyRope, read_rope

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.5},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, attention factor, no truncation": {
        "factor": 4.0,
        "attention_factor": 1.25,
        "truncate": False,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    "yarn, mscale": {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn, factor derived": {"factor": None, "original_max_position_embeddings": 1024},
    "yarn, one end beyond the head": {"factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 500.0, "beta_slow": 0.001},
}
MAX_POSITIONS = 4096


def rope(kind: str, **values: Any) -> AnyRope:
    return read_rope({"rope_type": kind.split(",")[0], "rope_theta": 5e5, **values}, None, 10_000.0, MAX_POSITIONS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [24, 64, 128])
def test_frequencies_equal_transformers_bit_by_bit(kind: str, head_dim: int) -> None:
    name, values = kind.split(",")[0], KINDS[kind]
    length = 9000 if name == "dynamic" else MAX_POSITIONS
    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=MAX_POSITIONS, rope_parameters={"rope_type": name, "rope_theta": 5e5, **values}
    )
    expected, factor = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"), seq_len=length)
    ours = rope(kind, **values)
    assert torch.equal(frequencies(ours, head_dim, length), expected)
    assert attention_factor(ours) == pytest.approx(factor, rel=1e-12)


def test_the_attention_factor_of_yarn_scales_cosines_and_sines() -> None:
    table = rotary_table(rope("yarn", factor=4.0), 32, 10)
    torch.testing.assert_close(table[0], torch.cat((torch.ones(16), torch.zeros(16))) * 1.1386294)


def test_queries_grow_each_time_the_original_context_is_passed() -> None:
    scale = query_scale(rope("yarn", factor=4.0, original_max_position_embeddings=8, llama_4_scaling_beta=0.1), 30)
    assert scale is not None
    expected = 1 + 0.1 * torch.tensor([1.0] * 8 + [2.0] * 8 + [3.0] * 8 + [4.0] * 6).log()
    torch.testing.assert_close(scale, expected)
    assert query_scale(rope("default"), 30) is None


@pytest.mark.parametrize(
    "parameters, scaling, theta",
    [
        ({"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}, None, 10_000.0),
        ({"type": "linear", "rope_theta": 5e5, "factor": 2.0}, None, 10_000.0),
        (None, {"type": "linear", "factor": 2.0}, 5e5),
        (None, {"rope_type": "linear", "factor": 2.0}, 5e5),
        ({"rope_type": "default", "rope_theta": 5e5}, {"rope_type": "linear", "factor": 2.0}, 5e5),
    ],
)
def test_both_layouts_of_the_config_mean_the_same(parameters: dict[str, Any] | None, scaling: dict[str, Any] | None, theta: float) -> None:
    assert read_rope(parameters, scaling, theta, MAX_POSITIONS) == rope("linear", factor=2.0)


@pytest.mark.parametrize(
    "kind, values, length",
    [
        ("default", {}, MAX_POSITIONS),
        ("linear", {"factor": 2.0}, 2 * MAX_POSITIONS),
        ("dynamic", {"factor": 2.0}, 2 * MAX_POSITIONS),
        ("llama3", KINDS["llama3"], MAX_POSITIONS),
        ("yarn", {"factor": 4.0}, 4 * MAX_POSITIONS),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 1024}, MAX_POSITIONS),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 2048}, 2 * MAX_POSITIONS),
    ],
)
def test_mod_05_how_far_a_kind_extends_the_context(kind: str, values: dict[str, Any], length: int) -> None:
    assert rope(kind, **values).max_length == length


@pytest.mark.parametrize(
    "kind, values, named",
    [
        ("longrope", {"short_factor": [1.0], "long_factor": [1.0]}, "longrope"),
        ("default", {"mrope_section": [1, 2]}, "mrope_section"),
        ("linear", {"factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("linear", {}, "factor"),
        ("yarn", {"factor": 4.0, "mscale_typo": 1.0}, "mscale_typo"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(kind: str, values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        rope(kind, **values)
