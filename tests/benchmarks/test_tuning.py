"""What searches write is what the kernels read."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton

from benchmarks import tune_layers
from benchmarks.candidates import products
from benchmarks.tune_attention import before_of
from benchmarks.tune_layers import LayerTuner, choices_of
from benchmarks.tuning import RenewedTable
from kernels import decode_splits, linear, moe, tuning
from kernels.moe_grouped import GroupedConfig
from kernels.skinny_linear import Config

GPU = torch.device("cuda", 0)
ONE, TWO = Config(1, 8, 1024, 1, 4, 1, 0, reads_unscaled=1), Config(1, 8, 512, 1, 4, 1, 0)
EXPERTS = GroupedConfig(16, 32, 256, 4, 3, 0, 0, 0), GroupedConfig(16, 64, 128, 4, 4, 1, 0, 1)


@pytest.fixture
def kernels_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where the tables stand that are read; of a GPU that is not here."""
    tuning.tables.cache_clear()
    tuning.forget()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA X1")
    monkeypatch.setattr(tuning, "FOLDER", tmp_path / "kernels")
    (tmp_path / "kernels").mkdir()
    yield tmp_path / "kernels"
    tuning.tables.cache_clear()
    tuning.forget()


def test_a_renewed_table_is_read_back_beside_what_was_not_renewed(kernels_folder: Path, tmp_path: Path) -> None:
    before = {"3.1.0": {"16 bits": {"linear": {"64x1024": {"1": [*TWO], "8": [*TWO]}}}}}
    (kernels_folder / "tuning_nvidia_x1.json").write_text(json.dumps(before))
    assert linear.config("linear", GPU, torch.bfloat16, 1, 64, 1024) == TWO

    renewed = RenewedTable(tmp_path / "out")
    renewed.entries.setdefault("linear", {}).setdefault("64x1024", {})["1"] = [*ONE]
    renewed.entries.setdefault("moe", {}).setdefault("4x2x64x32", {})["8"] = [number for each in EXPERTS for number in each]
    renewed.write()
    assert linear.config("linear", GPU, torch.bfloat16, 1, 64, 1024) == TWO  # until it is copied

    renewed.path.replace(kernels_folder / renewed.path.name)
    tuning.tables.cache_clear()
    tuning.forget()
    assert tuning.tables(GPU).keys() == {"3.1.0", triton.__version__}
    assert tuning.tables(GPU)["3.1.0"] == before["3.1.0"]
    assert linear.config("linear", GPU, torch.bfloat16, 1, 64, 1024) == ONE
    assert linear.config("linear", GPU, torch.float16, 8, 64, 1024) == TWO
    assert moe.config(GPU, torch.bfloat16, 3, 2, 4, 64, 32) == EXPERTS
    assert tuning.borrowed(GPU) == {"linear 64x1024": "3.1.0"}


def test_what_is_kept_of_attention_has_the_shares_of_long_rows(kernels_folder: Path) -> None:
    """Though the rows that are timed have fewer."""
    entry = [64, 4, 2, 32, 2, 0]
    (kernels_folder / "tuning_nvidia_x1.json").write_text(
        json.dumps({triton.__version__: {"16 bits": {"decode_attention": {"16x8x128": {"1": entry}}}}})
    )
    assert [*decode_splits.config(GPU, torch.bfloat16, 1, 16, 8, 128, 1152)] == [64, 4, 2, 9, 2, 0]
    assert [*before_of(1, (16, 8, 128))] == entry


def test_a_layer_takes_the_products_that_are_fastest_together(
    kernels_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer whose time is made up: its second product is fastest by a configuration that loses alone, its last by cuBLASLt."""
    qkv, output, gate_up, down = shapes = products("Qwen3-0.6B")
    old, alone, together = (Config(8, 64, 128, splits, 4, 3, 0, weights_first=1) for splits in (1, 2, 4))
    (kernels_folder / "tuning_nvidia_x1.json").write_text(
        json.dumps({triton.__version__: {"16 bits": {"linear": {qkv.shape: {"8": [*old]}}}}})
    )
    renewed, before = RenewedTable(tmp_path / "out"), choices_of("Qwen3-0.6B", 8)
    for each in shapes:
        renewed.put(each.operation, each.shape, 8, [*alone])

    def made_up_us(layers: object) -> float:
        took = 100.0
        for each, fastest in ((qkv, old), (output, together), (gate_up, together._replace(reads_unscaled=1))):
            took -= 10 * (each.config(8) == fastest)
        return took - 10 * (down.config(8) is None and down.is_lt_faster(8))

    monkeypatch.setattr(tune_layers, "layers_of", lambda model, rows: [])
    monkeypatch.setattr(tune_layers, "time_layers", made_up_us)
    LayerTuner("Qwen3-0.6B", 8, renewed).decide(before, {each: [alone, together] for each in shapes})
    assert made_up_us([]) == 60.0
    assert renewed.entries["library"][f"{down.columns}x{down.size}"]["8"] == [1]
    assert renewed.entries["linear"][qkv.shape]["8"] == [*old]
