"""Turns a Llama-type GGUF file into the folder that Hugging Face tools read, without torch.

Only what is understood in full is converted: an unknown hyperparameter, tensor or pre-tokenizer is refused by name,
since a model that ignores it would answer, only worse.
"""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import ReaderTensor
from tqdm import tqdm

from services.worker.weights.checksums import ChecksumError, sha256, write_checksums
from services.worker.weights.gguf_file import InvalidGGUF, Metadata, UnsupportedGGUF, open_gguf
from services.worker.weights.gguf_tokenizer import special_id, write_tokenizer
from services.worker.weights.gguf_weights import write_weights
from shared.errors import ConfigError

CONVERSION = 1  # raise it when the files written from the same GGUF file change

UNDERSTOOD = {  # of the keys `llama.*`: any other may change what the model computes
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "vocab_size",
}


def source_mark(gguf_sha256: str) -> str:
    """What `checksums.json` of a folder converted from that file names as its source."""
    return f"GGUF {gguf_sha256}, conversion {CONVERSION}"


def convert_gguf(source: Path, folder: Path, expected_sha256: str | None = None, *, progress: bool = False) -> None:
    """Writes `folder` (new; its parent exists) with config, weights, tokenizer and checksums, in one step: whole or not at all.

    `progress` shows a bar on stderr. Raises ConfigError if the folder exists, ChecksumError if the file is not the expected
    one, InvalidGGUF or UnsupportedGGUF if it cannot be converted.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists: remove it, or convert into another folder")
    found = sha256(source)
    if expected_sha256 not in (None, found):
        raise ChecksumError(f"{source.name} has SHA-256 {found}, not {expected_sha256}: fetch it again")
    metadata, tensors = open_gguf(source)
    # Inside of a temporary folder, whose mode is 0700: the result gets the mode of any new folder.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        result = Path(temporary) / folder.name
        result.mkdir()
        config = llama_config(metadata, tensors)
        write_tokenizer(metadata, result)
        _write_json(result / "config.json", config)
        _write_json(result / "generation_config.json", generation_config(metadata, config))
        with tqdm(desc=f"converting {source.name}", unit="B", unit_scale=True, disable=not progress) as bar:
            write_weights(config, tensors, result / "model.safetensors", bar)
        write_checksums(result, source_mark(found))
        result.rename(folder)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def llama_config(metadata: Metadata, tensors: dict[str, ReaderTensor]) -> dict[str, Any]:
    """config.json of the file's model. Raises UnsupportedGGUF for another architecture or an unknown hyperparameter."""
    architecture = metadata.required("general.architecture", str)
    if architecture != "llama":
        raise UnsupportedGGUF(f"architecture {architecture!r} is not supported, only 'llama'")
    unknown = metadata.names("llama.") - UNDERSTOOD
    if unknown:
        raise UnsupportedGGUF(f"hyperparameters not understood: {', '.join(f'llama.{name}' for name in sorted(unknown))}")
    scaling = metadata.optional("llama.rope.scaling.type", str)
    if scaling not in (None, "none"):
        raise UnsupportedGGUF(f"RoPE scaling {scaling!r} is not supported")

    hidden, heads = _size(metadata, "embedding_length"), _size(metadata, "attention.head_count")
    kv_heads = _size(metadata, "attention.head_count_kv", heads)
    head_dim = _size(metadata, "attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if _size(metadata, key, head_dim) != head_dim:
            raise UnsupportedGGUF(f"llama.{key} is {_size(metadata, key)}, but heads have {head_dim} dimensions")
    if heads % kv_heads or head_dim % 2:
        raise InvalidGGUF(f"{heads} query heads over {kv_heads} KV heads of {head_dim} dimensions are not possible")
    if "token_embd.weight" not in tensors:
        raise InvalidGGUF("the tensor token_embd.weight is missing")
    vocab_size = int(tensors["token_embd.weight"].shape[-1])
    tokens = len(metadata.array("tokenizer.ggml.tokens", str))
    named = _size(metadata, "vocab_size", vocab_size)
    if not tokens == vocab_size == named:
        raise InvalidGGUF(f"{tokens} tokens, {vocab_size} rows of token_embd.weight and llama.vocab_size {named} differ")
    layers = _size(metadata, "block_count")
    if layers > len(tensors):
        raise InvalidGGUF(f"llama.block_count is {layers}, but the file holds {len(tensors)} tensors")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": _size(metadata, "feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": _size(metadata, "context_length"),
        "rms_norm_eps": _real(metadata, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _real(metadata, "rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "torch_dtype": "bfloat16",
        "bos_token_id": special_id(metadata, "bos", tokens),
        "eos_token_id": special_id(metadata, "eos", tokens),
        "pad_token_id": special_id(metadata, "padding", tokens),
    }


def generation_config(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json: the ids that begin, end and pad a text. All that end a turn count as EOS."""
    ends = [special_id(metadata, name, config["vocab_size"]) for name in ("eos", "eot", "eom")]
    eos = sorted({token_id for token_id in ends if token_id is not None})
    ids = {"bos_token_id": config["bos_token_id"], "eos_token_id": eos[0] if len(eos) == 1 else eos, "pad_token_id": config["pad_token_id"]}
    return {name: value for name, value in ids.items() if value not in (None, [])}


def _size(metadata: Metadata, key: str, default: int | None = None) -> int:
    """A count or a dimension: at least 1, and far below what would overflow a product of a few."""
    value = metadata.optional(f"llama.{key}", int)
    if value is None:
        value = default if default is not None else metadata.required(f"llama.{key}", int)
    if not 0 < value < 2**31:
        raise InvalidGGUF(f"llama.{key} is {value}")
    return value


def _real(metadata: Metadata, key: str, default: float | None = None) -> float:
    """A positive number as it was meant before float32: 1e-05, not 9.999999747378752e-06."""
    value = metadata.optional(f"llama.{key}", float)
    if value is None:
        value = default if default is not None else metadata.required(f"llama.{key}", float)
    if not 0 < value < math.inf:
        raise InvalidGGUF(f"llama.{key} is {value}")
    return float(str(np.float32(value)))
