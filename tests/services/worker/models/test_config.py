"""What is read of a config.json: every field of every family, and what is refused."""

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import AliasChoices, BaseModel
from transformers import (
    LlamaConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from services.worker.models.config import BaseFields, ModelConfig, read_config
from services.worker.models.llama import LlamaFields
from services.worker.models.mistral import MistralFields
from services.worker.models.mistral3 import Ministral3Fields, Mistral3Fields
from services.worker.models.mixtral import MixtralFields
from services.worker.models.qwen2 import Qwen2Fields
from services.worker.models.qwen3 import Qwen3Fields
from services.worker.models.qwen3_moe import Qwen3MoeFields
from services.worker.models.registry import describe, families
from shared.errors import ConfigError

FAMILIES: list[tuple[type[BaseFields], type[PreTrainedConfig]]] = [
    (LlamaFields, LlamaConfig),
    (Qwen2Fields, Qwen2Config),
    (Qwen3Fields, Qwen3Config),
    (Qwen3MoeFields, Qwen3MoeConfig),
    (MistralFields, MistralConfig),
    (Mistral3Fields, Mistral3Config),
    (Ministral3Fields, Ministral3Config),
    (MixtralFields, MixtralConfig),
]
DOCS = Path(__file__).parents[4] / "docs" / "model-configs.md"
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}


def config(architecture: str, **values: Any) -> ModelConfig:
    return describe({**SHAPE, "architectures": [architecture], **values}, set())[1]


def names(kind: type[BaseModel]) -> dict[str, str]:
    """The names in a file of what a class reads -> its attribute."""
    found = {}
    for attribute, information in kind.model_fields.items():
        alias = information.validation_alias
        for name in alias.choices if isinstance(alias, AliasChoices) else [attribute]:
            found[str(name)] = attribute
    return found


@pytest.mark.parametrize("ours, theirs", FAMILIES)
def test_every_field_of_transformers_config_is_read_or_known_to_be_without_effect(
    ours: type[BaseFields], theirs: type[PreTrainedConfig]
) -> None:
    declared = {field.name for field in fields(theirs)} | set(theirs.attribute_map.values())
    written = json.loads(theirs().to_json_string(use_diff=False)).keys()  # what a checkpoint may hold
    assert sorted((declared | written) - names(ours).keys() - ours.ignored) == []


@pytest.mark.parametrize("ours, theirs", FAMILIES)
def test_a_field_that_is_absent_means_what_it_means_to_transformers(ours: type[BaseFields], theirs: type[PreTrainedConfig]) -> None:
    defaults = {field.name: field.default for field in fields(theirs) if field.default is not MISSING}
    for name, attribute in names(ours).items():
        information = ours.model_fields[attribute]
        if name in defaults and not information.is_required() and attribute != "per_layer_config":
            assert information.default == defaults[name], name


def documented() -> dict[str, set[str]]:
    """Field -> the families that the docs say read it."""
    (table,) = re.findall(r"^## Fields that are read$(.*?)^## ", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` \| ([\w ,-]+) \|", table, re.MULTILINE)
    return {name: {family.strip() for family in families.split(",")} for name, families in rows}


@pytest.mark.parametrize("ours", [ours for ours, _ in FAMILIES])
def test_the_docs_tell_what_is_read(ours: type[BaseFields]) -> None:
    family = {"Qwen3MoeFields": "Qwen3-MoE"}.get(ours.__name__, ours.__name__.removesuffix("Fields"))
    listed = {name for name, readers in documented().items() if family in readers or (family != "Mistral3" and "all" in readers)}
    assert listed == names(ours).keys()


def test_the_docs_tell_what_is_not_read_and_every_family() -> None:
    text = DOCS.read_text()
    ignored = frozenset[str]().union(*(ours.ignored for ours, _ in FAMILIES))
    assert [name for name in sorted(ignored | families().keys()) if f"`{name}`" not in text] == []


def test_unknown_fields_are_told_and_known_ones_are_not() -> None:
    _, _, remarks = describe({**SHAPE, "attention_dropout": 0.1, "use_qkv_mixing": True, "rope_interleaved": False}, set())
    assert remarks == ["config.json: unknown fields without effect: rope_interleaved, use_qkv_mixing"]
    text = {**SHAPE, "sliding_window": None, "surprise": 1}
    _, unknown = read_config(Mistral3Fields, {"text_config": text, "vision_config": {}, "riddle": 2})
    assert unknown == ["riddle", "text_config.surprise"]


@pytest.mark.parametrize(
    "architecture, values, told",
    [
        ("GPT2LMHeadModel", {}, "architecture GPT2LMHeadModel is not supported; supported: LlamaForCausalLM, "),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "config.json: hidden_act is 'gelu', but input should be 'silu'"),
        (
            "LlamaForCausalLM",
            {"quantization_config": {"quant_method": "awq"}},
            "config.json: quantised checkpoints (awq) are not supported",
        ),
        ("LlamaForCausalLM", {"num_hidden_layers": None}, "config.json: num_hidden_layers is None, but input should be a valid integer"),
        ("LlamaForCausalLM", {"hidden_size": 64.5}, "config.json: hidden_size is 64.5, but input should be a valid integer"),
        ("LlamaForCausalLM", {"head_dim": 15}, "config.json: a head_dim of 15 cannot be rotated, an even one is wanted"),
        ("LlamaForCausalLM", {"hidden_size": 66}, "config.json: 4 num_attention_heads do not divide hidden_size 66"),
        (
            "LlamaForCausalLM",
            {"num_key_value_heads": 3},
            "config.json: 3 num_key_value_heads do not divide 4 num_attention_heads",
        ),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "config.json: rope 'longrope' is not supported, only 'default', 'linear', 'dynamic', 'llama3', 'yarn'",
        ),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0, "odd": 1}}, "config.json: linear.odd is not supported"),
        (
            "LlamaForCausalLM",
            {"max_position_embeddings": 2**31},
            "config.json: rope: a context of 2147483648 positions, at most 2147483647",
        ),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "dynamic", "factor": 1e9}},
            "config.json: rope: a context of 128000000000 positions, at most 2147483647",
        ),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"type": "yarn", "factor": 1e308}},
            "config.json: yarn.factor is 1e+308, but input should be",
        ),
        (
            "LlamaForCausalLM",
            {"partial_rotary_factor": 0.5},
            "config.json: partial_rotary_factor is 0.5, but input should be greater than or equal to 1",
        ),
        ("LlamaForCausalLM", {"per_layer_config": {"0": {"hidden_size": 4}}}, "config.json: per_layer_config.0 is not supported"),
        (
            "Qwen2ForCausalLM",
            {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            "config.json: layer_types.1 is 'chunked_attention', but input should be 'full_attention' or 'sliding_attention'",
        ),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"]}, "config.json: 1 layer_types for 3 num_hidden_layers"),
        (
            "Qwen3ForCausalLM",
            {"layer_types": ["sliding_attention"] * 3},
            "config.json: layer_types has sliding_attention, but no sliding_window is in use",
        ),
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 129}, "config.json: num_experts_per_tok 129 is more than the 128 experts"),
        ("Mistral3ForConditionalGeneration", {}, "config.json: text_config is missing"),
        ("Mistral3ForConditionalGeneration", {"text_config": 3}, "config.json: text_config is 3, but unable to extract tag"),
        ("Mistral3ForConditionalGeneration", {"text_config": {"model_type": "mamba"}}, "config.json: text_config 'mamba' is not supported"),
        (
            "Mistral3ForConditionalGeneration",
            {"text_config": {**SHAPE, "model_type": "ministral3"}},
            "config.json: rope_parameters is missing",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(architecture: str, values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(architecture, **values)
    assert str(refused.value).startswith(told)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("architectures", [None, [], [None], [["LlamaForCausalLM"]], {"a": 1}, "LlamaForCausalLM", 3])
def test_architectures_that_name_none_are_refused(architectures: object) -> None:
    with pytest.raises(ConfigError, match=r"^architecture .* is not supported; supported: LlamaForCausalLM, "):
        describe({**SHAPE, "architectures": architectures}, set())


def test_missing_fields_are_told_together() -> None:
    with pytest.raises(ConfigError, match=r"^config.json: vocab_size is missing; hidden_size is missing; .* rms_norm_eps is missing"):
        describe({"architectures": ["LlamaForCausalLM"]}, set())


def test_sliding_windows_by_layer() -> None:
    assert config("Qwen2ForCausalLM", sliding_window=9, max_window_layers=1).windows == (None, None, None)  # use_sliding_window is false
    used = {"use_sliding_window": True, "sliding_window": 9}
    assert config("Qwen2ForCausalLM", **used, max_window_layers=1).windows == (None, 9, 9)
    assert config("Qwen3ForCausalLM", **used, max_window_layers=28).windows == (None, None, None)
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert config("Qwen3ForCausalLM", **used, layer_types=layer_types, max_window_layers=0).windows == (9, None, 9)
    assert config("Qwen3MoeForCausalLM", **used).windows == (9, 9, 9)
    assert config("MistralForCausalLM", sliding_window=9).windows == (9, 9, 9)
    assert config("MistralForCausalLM", sliding_window=None).windows == (None, None, None)
    assert config("MistralForCausalLM").windows == (4096, 4096, 4096)


def test_which_layers_have_experts() -> None:
    def layers(**values: Any) -> set[int]:
        experts = config("Qwen3MoeForCausalLM", num_hidden_layers=6, **values).experts
        assert experts is not None
        return set(experts.layers)

    assert layers() == {0, 1, 2, 3, 4, 5}
    assert layers(decoder_sparse_step=2) == {1, 3, 5}
    assert layers(decoder_sparse_step=2, mlp_only_layers=[3]) == {1, 5}
    assert layers(num_experts=0) == set()


@pytest.mark.parametrize(
    "outer, inner, tensors, tied",
    [
        ({}, {}, {"language_model.lm_head.weight"}, False),
        ({}, {}, set(), True),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, {"lm_head.weight"}, False),  # as transformers 5 saves an untied one
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": True}, {"lm_head.weight"}, True),
        ({}, {"tie_word_embeddings": False}, set(), False),
        ({"tie_word_embeddings": False}, {}, set(), False),
    ],
)
def test_mistral3_is_tied_where_both_levels_agree_or_else_without_a_head(
    outer: dict[str, Any], inner: dict[str, Any], tensors: set[str], tied: bool
) -> None:
    hf = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {**SHAPE, **inner}, **outer}
    assert describe(hf, tensors)[1].tied_embeddings == tied
