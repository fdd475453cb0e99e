"""Tables of tiles: by GPU, Triton, bits, operation, shape and size."""

import json
from pathlib import Path

import pytest
import torch
import triton

from kernels import linear, moe, tuning
from kernels.moe_grouped import GroupedConfig
from kernels.skinny_linear import Config
from kernels.tuning import borrowed, entries
from tests.kernels.support import DEVICE

GPU = torch.device("cuda", 0)
ONE, TWO, THREE = [1, 8, 1024, 1, 4, 1, 0], [1, 8, 512, 1, 4, 1, 0], [16, 16, 256, 1, 4, 3, 0]
OWN = triton.__version__


def linears(**entries: list[int]) -> dict[str, tuning.Table]:
    return {"16 bits": {"linear": {"64x1024": {name.removeprefix("rows_"): numbers for name, numbers in entries.items()}}}}


@pytest.mark.parametrize("others", [("3.9.0", "3.10.0"), ("0.1.0", "0.2.0")])  # newer ones than what runs, and older ones
def test_what_another_triton_found_serves_where_this_one_has_nothing(tables: tuning.Tables, others: tuple[str, str]) -> None:
    tables |= {OWN: linears(rows_1=ONE), others[0]: linears(rows_1=TWO, rows_8=TWO, rows_16=TWO), others[1]: linears(rows_8=THREE)}
    assert entries(DEVICE, torch.bfloat16, "linear", "64x1024") == {"1": ONE, "8": THREE, "16": TWO}
    assert borrowed(DEVICE) == {"linear 64x1024": ", ".join(sorted(others))}
    assert linear.config("linear", DEVICE, torch.bfloat16, 5, 64, 1024) == Config(*THREE)


def test_nothing_is_borrowed_where_this_triton_measured_all(tables: tuning.Tables) -> None:
    tables |= {"3.1.0": linears(rows_1=TWO), OWN: linears(rows_1=[])}
    assert entries(DEVICE, torch.float16, "linear", "64x1024") == {"1": []}  # the library was faster
    assert entries(DEVICE, torch.bfloat16, "linear", "65x1024") == {}
    assert borrowed(DEVICE) == {}


def test_which_of_the_librarys_products_is_faster_is_borrowed_from_no_triton(tables: tuning.Tables) -> None:
    tables |= {"3.1.0": {"16 bits": {"library": {"64x1024": {"8": [1]}}}}}
    assert entries(DEVICE, torch.float16, "library", "64x1024") == {"8": [1]}
    assert borrowed(DEVICE) == {}


def test_types_of_other_sizes_have_entries_of_their_own(tables: tuning.Tables) -> None:
    tables |= {OWN: {"16 bits": {"linear": {"64x1024": {"1": ONE}}}, "32 bits": {"linear": {"64x1024": {"1": TWO}}}}}
    found = [linear.config("linear", DEVICE, dtype, 1, 64, 1024) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    assert found == [Config(*each) for each in (ONE, ONE, TWO)]
    assert linear.config("linear", DEVICE, torch.float64, 1, 64, 1024) is None


def test_experts_have_the_entries_of_another_triton_too(tables: tuning.Tables) -> None:
    gate_up, down = GroupedConfig(16, 32, 256, 4, 3, 0, 0, 0), GroupedConfig(16, 64, 128, 4, 4, 1, 0, 1)
    tables |= {"3.1.0": {"16 bits": {"moe": {"4x2x64x32": {"8": [*gate_up, *down]}}}}}
    assert moe.config(DEVICE, torch.bfloat16, 100, 2, 4, 64, 32) == (gate_up, down)
    assert borrowed(DEVICE) == {"moe 4x2x64x32": "3.1.0"}
    assert moe.config(DEVICE, torch.float32, 100, 2, 4, 64, 32) == moe.FIXED[4]


def test_a_table_is_found_by_the_name_of_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tuning.tables.cache_clear()
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T1000 8GB")
    written = {OWN: linears(rows_1=ONE)}
    (tmp_path / "tuning_nvidia_t1000_8gb.json").write_text(json.dumps(written))
    assert tuning.tables(GPU) == written
    assert tuning.tables(torch.device("cpu")) == {}
    tuning.tables.cache_clear()
    (tmp_path / "tuning_nvidia_t1000_8gb.json").unlink()
    assert tuning.tables(GPU) == {}
    tuning.tables.cache_clear()
