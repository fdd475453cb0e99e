"""A model's shape, read from the raw `config.json`: names differ by family and by transformers' version, ours do not.

A family declares the fields that it reads as a pydantic class, with transformers' names and defaults; what it does not declare
and what is not in IGNORED is told to the operator. No torch here: the supervisor reads configs too.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator
from pydantic_core import ErrorDetails

from services.worker.models.rope import AnyRope, read_rope
from shared.errors import ConfigError

HFConfig = dict[str, Any]

# Fields without effect on a forward pass.
# fmt: off
IGNORED = frozenset((
    # read elsewhere: by the registry, for the EOS ids, by the tokenizer
    "architectures", "model_type", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    # the checkpoint's origin
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map", "_attn_implementation", "attn_implementation",
    # training
    "attention_dropout", "initializer_range", "output_router_logits", "router_aux_loss_coef", "pretraining_tp", "tie_last_hidden_states",
    # what transformers returns and keeps
    "use_cache", "return_dict", "output_attentions", "output_hidden_states", "is_encoder_decoder", "chunk_size_feed_forward",
    # other heads than the language model's
    "id2label", "label2id", "num_labels", "problem_type",
))
# fmt: on


@dataclass(frozen=True)
class Experts:
    """The routed experts of a model's sparse layers. Raises ConfigError when a token cannot choose so many."""

    count: int
    per_token: int
    intermediate_size: int
    renormalise: bool  # the chosen experts' probabilities to a sum of 1
    layers: frozenset[int]  # which layers have experts; the others are dense

    def __post_init__(self) -> None:
        if self.layers and self.per_token > self.count:
            raise ConfigError(f"config.json: num_experts_per_tok {self.per_token} is more than the {self.count} experts")


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder; counts are of the whole model, not of a rank."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: AnyRope
    tied_embeddings: bool | None  # None: the config does not say, the checkpoint's tensors do
    windows: tuple[int | None, ...]  # by layer: how many positions a token attends to, its own included; None is all
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = field(default=None)

    @property
    def max_length(self) -> int:
        """Positions that the model was made for, by its rotary embedding."""
        return self.rope.max_length

    @property
    def scale(self) -> float:
        """Of attention scores."""
        return float(self.head_dim**-0.5)


class PerLayerConfig(BaseModel):
    """Empty: settings by layer are not supported."""

    model_config = ConfigDict(extra="forbid")


class BaseFields(BaseModel, ABC):
    """What is read of a JSON object, with transformers' names and defaults; nothing is converted, 4096.0 is no number of positions."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = IGNORED

    quantization_config: dict[str, Any] | None = None

    @field_validator("quantization_config")
    @classmethod
    def not_quantised(cls, value: dict[str, Any] | None) -> None:
        if value:
            raise ValueError(f"quantised checkpoints ({value.get('quant_method', 'unknown method')}) are not supported")

    @abstractmethod
    def config(self) -> ModelConfig:
        """The shape that the fields describe. Raises ConfigError for one that cannot be."""

    def unknown(self) -> list[str]:
        """Names of the file's fields that are neither read nor known to be without effect."""
        return sorted((self.model_extra or {}).keys() - self.ignored)


class DecoderFields(BaseFields):
    """The fields that all families read. A family adds its own, and turns all of them into a ModelConfig."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None
    head_dim: PositiveInt | None = None
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = Field(gt=0)
    max_position_embeddings: PositiveInt
    original_max_position_embeddings: PositiveInt | None = None
    tie_word_embeddings: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float | None = Field(None, ge=1, le=1)
    per_layer_config: PerLayerConfig | None = None

    def config(self) -> ModelConfig:
        kv_heads = self.num_key_value_heads or self.num_attention_heads
        if self.num_attention_heads % kv_heads:
            raise ConfigError(f"config.json: {kv_heads} num_key_value_heads do not divide {self.num_attention_heads} num_attention_heads")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ConfigError(f"config.json: {self.num_attention_heads} num_attention_heads do not divide hidden_size {self.hidden_size}")
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if head_dim % 2:
            raise ConfigError(f"config.json: a head_dim of {head_dim} cannot be rotated, an even one is wanted")
        return ModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            layers=self.num_hidden_layers,
            q_heads=self.num_attention_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=self.rms_norm_eps,
            rope=read_rope(
                self.rope_parameters,
                self.rope_scaling,
                self.rope_theta,
                self.max_position_embeddings,
                self.original_max_position_embeddings,
            ),
            tied_embeddings=self.tie_word_embeddings,
            windows=(None,) * self.num_hidden_layers,
        )


def layer_windows(layer_types: Sequence[str], window: int | None, layers: int) -> tuple[int | None, ...]:
    """Windows by layer from transformers' names of layer types. Raises ConfigError for a sliding layer without a window."""
    if len(layer_types) != layers:
        raise ConfigError(f"config.json: {len(layer_types)} layer_types for {layers} num_hidden_layers")
    if window is None and "sliding_attention" in layer_types:
        raise ConfigError("config.json: layer_types has sliding_attention, but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError naming the file."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a JSON object is wanted")
    return content


def read_config(kind: type[BaseFields], hf: HFConfig) -> tuple[ModelConfig, list[str]]:
    """The shape that a config.json describes, and the names of its fields that we do not know.

    Raises ConfigError naming every field that is missing or asks for something that we do not compute.
    """
    try:
        fields = kind.model_validate(hf)
        return fields.config(), fields.unknown()
    except ValidationError as error:
        raise ConfigError(f"config.json: {told(error)}") from error


def told(error: ValidationError) -> str:
    """All faults in one line."""
    return "; ".join(_told(fault) for fault in error.errors())


def _told(fault: ErrorDetails) -> str:
    place = ".".join(str(part) for part in fault["loc"]) or "rope"
    match fault["type"]:
        case "missing":
            return f"{place} is missing"
        case "extra_forbidden":
            return f"{place} is not supported"
        case "union_tag_invalid":
            return f"{place} {fault['ctx']['tag']!r} is not supported, only {fault['ctx']['expected_tags']}"
        case "value_error":
            return str(fault["ctx"]["error"])
        case _:
            return f"{place} is {fault['input']!r:.80}, but {fault['msg'][0].lower()}{fault['msg'][1:]}"
