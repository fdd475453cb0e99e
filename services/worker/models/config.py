"""A model's shape, read from the raw `config.json`: names differ by family and by transformers' version, ours do not."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

HFConfig = dict[str, Any]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: rotation frequencies `theta ** (-2i / dim)`."""

    theta: float
    dim: int  # rotated dimensions of a head


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
    max_length: int  # positions that the model was made for
    rope: RopeConfig
    tied_embeddings: bool

    @property
    def scale(self) -> float:
        """Of attention scores."""
        return float(self.head_dim**-0.5)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError naming the file."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a JSON object is wanted")
    return content


def require(hf: HFConfig, key: str) -> Any:
    """A key that the family cannot do without. Raises ConfigError naming it."""
    if hf.get(key) is None:
        raise ConfigError(f"config.json has no {key}")
    return hf[key]


def decoder_config(hf: HFConfig) -> ModelConfig:
    """What all families share. Raises ConfigError for what we do not compute, rather than computing something else."""
    if hf.get("quantization_config"):
        raise ConfigError(f"quantised checkpoints ({hf['quantization_config'].get('quant_method', 'unknown method')}) are not supported")
    if hf.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {hf['hidden_act']!r} is not supported, only 'silu'")
    hidden_size, q_heads = require(hf, "hidden_size"), require(hf, "num_attention_heads")
    head_dim = hf.get("head_dim") or hidden_size // q_heads
    return ModelConfig(
        vocab_size=require(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=require(hf, "intermediate_size"),
        layers=require(hf, "num_hidden_layers"),
        q_heads=q_heads,
        kv_heads=hf.get("num_key_value_heads") or q_heads,
        head_dim=head_dim,
        norm_eps=require(hf, "rms_norm_eps"),
        max_length=require(hf, "max_position_embeddings"),
        rope=_rope(hf, head_dim),
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
    )


def _rope(hf: HFConfig, head_dim: int) -> RopeConfig:
    """Since version 5, transformers keeps theta and scaling together in `rope_parameters`."""
    parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ConfigError(f"rope type {kind!r} is not supported, only 'default'")
    return RopeConfig(theta=parameters.get("rope_theta") or hf.get("rope_theta") or 10_000.0, dim=head_dim)
