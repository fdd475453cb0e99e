import pytest
import torch

from kernels.decode_splits import Config, choose_splits, config


def configured(rows: int, positions: int, dtype: torch.dtype = torch.bfloat16) -> Config:
    return config(torch.device("cuda", 0), dtype, rows, 16, 8, 128, positions)


def test_rows_are_cut_as_the_table_says_within_what_they_can_hold(table, monkeypatch):
    monkeypatch.setattr("kernels.decode_splits.multiprocessors", lambda device: 132)
    table["decode_attention"] = {"16x8x128": {"8": [64, 4, 2, 6, 5, 1], "32": [32, 4, 3, 4, 48, 0]}}
    assert configured(8, 8192) == Config(64, 4, 2, 6, 5, 1)
    assert [configured(5, positions).splits for positions in (256, 100)] == [2, 1]
    assert configured(9, 2048) == Config(32, 4, 3, 4, 48)
    assert configured(33, 2048) == Config(64, 4, 2, 2, 3)
    assert configured(8, 8192, torch.float32) == Config(16, 4, 2, 6, 3, 1)


def test_one_row_alone_is_cut_finest_and_does_not_rotate_within(table, monkeypatch):
    monkeypatch.setattr("kernels.decode_splits.multiprocessors", lambda device: 132)
    assert configured(1, 8192) == Config(64, 4, 2, 32, 2, 0)
    assert configured(2, 8192) == Config(64, 4, 2, 24, 3, 1)


@pytest.mark.parametrize("rows, least, splits", [(1, 1, 2), (1, 4, 4), (3, 1, 1), (64, 4, 4), (2**14, 4, 1)])
def test_a_row_is_cut_by_what_the_device_has_room_for_and_the_least(rows, least, splits):
    assert choose_splits(rows, 8, 8192, torch.device("cpu"), least) == splits
