import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import AutoConfig, AutoModelForCausalLM

from services.worker.weights.checksums import NAME as CHECKSUMS
from services.worker.weights.checksums import ChecksumError, sha256, verify_checksums
from services.worker.weights.gguf_file import InvalidGGUF, UnsupportedGGUF
from services.worker.weights.gguf_import import convert_gguf, source_mark
from shared.errors import ConfigError
from tests.services.worker.weights.tiny_gguf import TOKENS, tiny_llama, write_gguf


def logits(model: Any) -> Any:
    ids = torch.randint(len(TOKENS), (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


def converted(gguf: Path) -> Any:
    folder = gguf.with_name("model")
    convert_gguf(gguf, folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads, head_dim", [(4, 16), (2, 16), (1, 16), (2, 32)])
def test_logits_are_those_of_the_original(tmp_path, tied, kv_heads, head_dim):
    original = tiny_llama(tied=tied, kv_heads=kv_heads, head_dim=head_dim)
    model = converted(write_gguf(tmp_path / "tiny.gguf", original))
    assert ("lm_head.weight" in model.all_tied_weights_keys) == tied
    torch.testing.assert_close(logits(model), logits(original), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_1", "Q4_0"])
def test_logits_are_those_of_the_quantised_weights(tmp_path, name):
    quantization = GGMLQuantizationType[name]
    model = converted(write_gguf(tmp_path / "tiny.gguf", tiny_llama(), quantization=quantization))
    expected = tiny_llama()
    with torch.no_grad():
        for matrix in (parameter for parameter in expected.parameters() if parameter.dim() == 2):
            matrix.copy_(torch.from_numpy(dequantize(quantize(matrix.numpy(), quantization), quantization)).bfloat16())
    torch.testing.assert_close(logits(model), logits(expected), rtol=1e-5, atol=1e-5)


def test_config_has_the_original_hyperparameters(tmp_path):
    original = tiny_llama(head_dim=32).config
    convert_gguf(write_gguf(tmp_path / "tiny.gguf", tiny_llama(head_dim=32)), tmp_path / "model")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    not_in_gguf = {"_name_or_path", "architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id"}
    names = set(original.to_dict()) - not_in_gguf
    assert {name: getattr(config, name) for name in names} == {name: getattr(original, name) for name in names}
    assert (config.architectures, config.dtype) == (["LlamaForCausalLM"], torch.bfloat16)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)


def test_every_id_that_ends_a_turn_is_in_the_generation_config(tmp_path):
    convert_gguf(write_gguf(tmp_path / "tiny.gguf", tiny_llama(), changes={"tokenizer.ggml.eot_token_id": 3}), tmp_path / "model")
    written = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert written == {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"architecture": "qwen3"}, UnsupportedGGUF, "architecture 'qwen3'"),
        ({"changes": {"llama.expert_count": 8}}, UnsupportedGGUF, "llama.expert_count"),
        ({"changes": {"llama.rope.scaling.type": "yarn"}}, UnsupportedGGUF, "RoPE scaling 'yarn'"),
        ({"changes": {"llama.rope.dimension_count": 8}}, UnsupportedGGUF, "llama.rope.dimension_count is 8"),
        ({"changes": {"llama.block_count": None}}, InvalidGGUF, "llama.block_count is missing"),
        ({"changes": {"llama.block_count": 3}}, InvalidGGUF, "blk.2.attn_norm.weight is missing"),
        ({"changes": {"llama.block_count": 2**31 - 1}}, InvalidGGUF, "llama.block_count is 2147483647"),
        ({"changes": {"llama.embedding_length": 0}}, InvalidGGUF, "llama.embedding_length is 0"),
        ({"changes": {"llama.embedding_length": "64"}}, InvalidGGUF, "llama.embedding_length must be one int"),
        ({"changes": {"llama.attention.head_count_kv": [2, 2]}}, InvalidGGUF, "llama.attention.head_count_kv must be one int"),
        ({"changes": {"llama.attention.head_count_kv": 3}}, InvalidGGUF, "4 query heads over 3 KV heads"),
        ({"changes": {"llama.feed_forward_length": 128}}, InvalidGGUF, r"blk.0.ffn_gate.weight has shape \(96, 64\)"),
        ({"changes": {"llama.rope.freq_base": float("nan")}}, InvalidGGUF, "llama.rope.freq_base is nan"),
        ({"changes": {"llama.vocab_size": 7}}, InvalidGGUF, "llama.vocab_size 7 differ"),
        ({"without": ["blk.1.attn_k.weight"]}, InvalidGGUF, "blk.1.attn_k.weight is missing"),
        ({"without": ["token_embd.weight"]}, InvalidGGUF, "token_embd.weight is missing"),
        ({"extra": {"rope_freqs.weight": np.ones(8, np.float32)}}, UnsupportedGGUF, "rope_freqs.weight"),
        ({"without": ["output_norm.weight"], "extra": {"output_norm.weight": np.full(64, np.nan, np.float32)}}, InvalidGGUF, "not finite"),
        ({"without": ["output_norm.weight"], "extra": {"output_norm.weight": np.ones(64, np.int32)}}, UnsupportedGGUF, "of type I32"),
    ],
)
def test_what_cannot_be_converted_is_named_and_leaves_nothing(tmp_path, arguments, error, words):
    gguf = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), **arguments)
    with pytest.raises(error, match=words) as raised:
        convert_gguf(gguf, tmp_path / "model")
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == [gguf]


@pytest.mark.parametrize("kept", [0.0, 0.00001, 0.001, 0.02, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_refused(tmp_path, kept):
    gguf = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    gguf.write_bytes(gguf.read_bytes()[: int(gguf.stat().st_size * kept)])
    with pytest.raises(InvalidGGUF, match="not a complete GGUF file"):
        convert_gguf(gguf, tmp_path / "model")
    assert list(tmp_path.iterdir()) == [gguf]


def test_another_file_than_expected_is_refused(tmp_path):
    gguf = write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    with pytest.raises(ChecksumError, match=f"has SHA-256 {sha256(gguf)}, not {'0' * 64}"):
        convert_gguf(gguf, tmp_path / "model", "0" * 64)
    assert list(tmp_path.iterdir()) == [gguf]


def test_a_folder_that_exists_is_never_touched(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        convert_gguf(write_gguf(tmp_path / "tiny.gguf", tiny_llama()), tmp_path / "model")
    assert not list((tmp_path / "model").iterdir())


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda folder: flip_last_byte(folder / "model.safetensors"), "model.safetensors is not what was written"),
        (lambda folder: (folder / "config.json").write_text("{}"), "config.json is missing or not of its recorded"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / CHECKSUMS).unlink(), "no readable checksums.json"),
        (lambda folder: (folder / CHECKSUMS).write_text("[]"), "no readable checksums.json"),
    ],
)
def test_checksums_find_damage(tmp_path, damage, words):
    gguf, folder = write_gguf(tmp_path / "tiny.gguf", tiny_llama()), tmp_path / "model"
    convert_gguf(gguf, folder, sha256(gguf))
    verify_checksums(folder, source_mark(sha256(gguf)))
    with pytest.raises(ChecksumError, match="not of GGUF 0000"):
        verify_checksums(folder, source_mark("0" * 64))
    damage(folder)
    with pytest.raises(ChecksumError, match=words):
        verify_checksums(folder, source_mark(sha256(gguf)))
