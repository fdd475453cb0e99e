"""Tiny random checkpoints of every family, made and saved by transformers itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PixtralVisionConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 257  # divides by no number of ranks
MAX_LENGTH = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": None,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
}


def rope(kind: str, **values: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **values}


def llama(**values: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, **values}))


def qwen2(**values: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, **values}))


def qwen3(**values: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "head_dim": 32, **values}))


def qwen3_moe(**values: Any) -> PreTrainedModel:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SHAPE, **experts, **values}))


def mistral(**values: Any) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**{**SHAPE, **values}))


def mixtral(**values: Any) -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**{**SHAPE, **values}))


def mistral3(text: MistralConfig | Ministral3Config, tied: bool) -> PreTrainedModel:
    config = Mistral3Config(text_config=text, vision_config=PixtralVisionConfig(**VISION), tie_word_embeddings=tied, image_token_index=3)
    return Mistral3ForConditionalGeneration(config)


MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "max_position_embeddings": MAX_LENGTH,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

LLAMA3_ROPE = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)

MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: llama(rope_parameters=LLAMA3_ROPE, num_key_value_heads=None),
    "llama-biased": lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, num_key_value_heads=1),
    "llama-linear": lambda: llama(rope_parameters=rope("linear", factor=4.0), head_dim=24),
    "llama-dynamic": lambda: llama(rope_parameters=rope("dynamic", factor=4.0)),
    "llama-yarn": lambda: llama(rope_parameters=rope("yarn", factor=4.0, attention_factor=1.3, truncate=False, beta_fast=20.0)),
    "llama-yarn-mscale": lambda: llama(
        rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.3)
    ),
    "qwen2": lambda: qwen2(tie_word_embeddings=True),
    "qwen2-window": lambda: qwen2(use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen2-layer-types": lambda: qwen2(
        use_sliding_window=True, sliding_window=9, layer_types=["sliding_attention", "full_attention"], num_key_value_heads=1
    ),
    "qwen3": lambda: qwen3(rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "qwen3-biased": lambda: qwen3(
        attention_bias=True, tie_word_embeddings=True, use_sliding_window=True, sliding_window=33, max_window_layers=0
    ),
    "qwen3-moe": lambda: qwen3_moe(norm_topk_prob=True, num_key_value_heads=1),
    "qwen3-moe-dense-layers": lambda: qwen3_moe(
        num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3], use_sliding_window=True, sliding_window=50, attention_bias=True
    ),
    "mistral": lambda: mistral(sliding_window=24),
    "mistral-wide-heads": lambda: mistral(sliding_window=None, head_dim=48, rope_parameters=rope("default") | {"rope_theta": 1e6}),
    "mistral3": lambda: mistral3(MistralConfig(**{**SHAPE, "sliding_window": None, "head_dim": 16}), tied=False),
    "mixtral": lambda: mixtral(intermediate_size=32, num_local_experts=5, num_experts_per_tok=2, num_key_value_heads=1),
    "ministral3": lambda: mistral3(Ministral3Config(**{**SHAPE, "head_dim": 32, "rope_parameters": dict(MINISTRAL_ROPE)}), tied=True),
}


def make(model: PreTrainedModel, folder: Path, **saving: Any) -> Path:
    """Saves a model whose biases and norms are not the zeros and ones of a new one."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (0.0 if name.endswith("bias") else 1.0))
    model.save_pretrained(folder, **saving)
    return folder


# What the ranks share out is the same as in "llama".
ROPE_ONLY = {"llama-linear", "llama-dynamic", "llama-yarn", "llama-yarn-mscale"}


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))
    return folder
