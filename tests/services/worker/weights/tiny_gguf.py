"""A tiny Llama and the GGUF file that llama.cpp's converter would make of it."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFValueType, GGUFWriter, TokenType, get_tensor_name_map
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

CHAT_TEMPLATE = "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}\n"
TOKENS = ["<none>", "<start>", "<end>", "<turn>", "<tool>", *sorted(ByteLevel.alphabet()), "he", "ll", "hell", "Ġhell", "whole"]
TYPES = [TokenType.UNKNOWN, *3 * [TokenType.CONTROL], TokenType.USER_DEFINED, *(len(TOKENS) - 5) * [TokenType.NORMAL]]
VALUE_TYPES = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
MERGES = ["h e", "l l", "he ll", "Ġ hell"]  # none of them makes "whole"


def tiny_llama(*, tied: bool = False, kv_heads: int = 2, head_dim: int = 16) -> Any:
    """Random float32 weights that bfloat16 holds exactly; norms and RoPE that matter."""
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1)).bfloat16())
    return model


def metadata_of(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "llama.rope.dimension_count": config.head_dim,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [int(kind) for kind in TYPES],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_gguf(
    path: Path,
    model: Any,  # of tiny_llama
    *,
    architecture: str = "llama",
    changes: dict[str, Any] | None = None,
    without: Collection[str] = (),
    extra: dict[str, np.ndarray] | None = None,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """`changes` replaces metadata (None: leaves the key out), `without` and `extra` name tensors of the GGUF file."""
    writer = GGUFWriter(path, architecture)
    for key, value in (metadata_of(model) | (changes or {})).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_key_value(key, value, VALUE_TYPES[type(value)])
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    tensors = {str(names.get_name(name, try_suffixes=(".weight",))): (name, tensor) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["output.weight"]
    for gguf_name, (name, tensor) in tensors.items():
        weight = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
            weight = weight.reshape(heads, 2, model.config.head_dim // 2, -1).swapaxes(1, 2).reshape(weight.shape)
        kind = quantization if weight.ndim == 2 else GGMLQuantizationType.F32
        if gguf_name not in without:
            writer.add_tensor(gguf_name, quantize(weight, kind), raw_dtype=kind)
    for gguf_name, array in (extra or {}).items():
        writer.add_tensor(gguf_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
