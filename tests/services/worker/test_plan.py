"""The memory planner, against figures of models as published."""

import json
from pathlib import Path

import pytest

from services.worker.plan import describe, main, room_bytes, shape_of
from shared.errors import ConfigError

QWEN3_0_6B = {
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    return tmp_path


def test_sizes_are_those_of_the_model(config: Path) -> None:
    lines = list(describe(shape_of(config), "h200", None))
    assert "1.2 GB in bfloat16" in lines[0]  # 0.6 billion parameters
    assert "112 KiB a token" in lines[1]  # 2 x 28 layers x 8 heads x 128 x 2 bytes
    assert "1 x h200" in lines[2]


def test_copies_of_kv_heads_cost_memory(config: Path) -> None:
    shape = shape_of(config)
    assert "224 KiB a token" in list(describe(shape, "l40s", 16))[1]
    assert room_bytes(shape, "l40s", 2) > room_bytes(shape, "l40s", 1) > 0


def test_as_few_gpus_as_the_weights_need(tmp_path: Path) -> None:
    large = {**QWEN3_0_6B, "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28_672}
    (tmp_path / "config.json").write_text(json.dumps(large))  # about 140 GB
    assert "2 x h200" in list(describe(shape_of(tmp_path), "h200", None))[2]
    assert "4 x l40s" in list(describe(shape_of(tmp_path), "l40s", None))[2]
    with pytest.raises(ConfigError, match="do not fit in 1 x h200"):
        list(describe(shape_of(tmp_path), "h200", 1))


def test_what_cannot_be_is_one_line(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    without_heads = config / "without_heads.json"
    without_heads.write_text(json.dumps({**QWEN3_0_6B, "num_attention_heads": 0, "head_dim": None}))
    for arguments, named in (
        ([str(config / "nothing")], "config: "),
        ([str(without_heads)], "config: "),
        ([str(config), "--tensor-parallel-size", "3"], "tensor_parallel_size: 16 heads and 8 KV heads"),
    ):
        monkeypatch.setattr("sys.argv", ["plan", *arguments])
        assert main() == 2
        error = capsys.readouterr().err
        assert error.startswith(f"lockstep plan: {named}")
        assert error.count("\n") == 1
