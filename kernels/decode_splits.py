"""How decode attention cuts its rows into shares, and by what tiles it reads them: by the table of the GPU, or by rules for what it lacks.

B rows, Q and K query and KV heads of this rank, H head size. All of this is chosen by shapes, which a captured launch keeps; where a share
begins and ends is chosen by the lengths, on the device: `share_of` in `kernels.decode_attention`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.launch import MAX_COUNTERS, multiprocessors, next_power_of_2
from kernels.tuning import entries, entry_for, remembered

MAX_SPLITS = 32
LEAST_POSITIONS = 128  # of a share, where the page table is full
FEW_ROWS, FEW_QUERIES = 16, 4  # heads of a KV head
CHUNK_OF_WARP = 2048  # elements of shares that a warp puts together at a time: 64 registers a thread


class Config(NamedTuple):
    block: int  # positions of a tile
    warps: int
    stages: int
    splits: int  # shares of a row, at most
    least_tiles: int = 2  # of a share; of one tile, a row of 1,088 positions with 40/8 heads of 128 takes 11 us instead of 7
    rotates: int = 0  # 1: `kernels.rotated_attention` is faster than the rotation and `kernels.decode_attention`


@remembered
def config(device: torch.device, dtype: torch.dtype, rows: int, q_heads: int, kv_heads: int, head_size: int, positions: int) -> Config:
    """By the table of the GPU, or by rules for shapes and rows that it has not; positions: the most that the page table can hold."""
    found = entry_for(entries(device, dtype, "decode_attention", f"{q_heads}x{kv_heads}x{head_size}"), rows)
    if found:
        tuned = Config(*found)
        return tuned._replace(splits=max(min(tuned.splits, positions // LEAST_POSITIONS), 1))
    plain = cut_in(choose_splits(rows, kv_heads, positions, device), head_size, dtype.itemsize)
    alone, rotates = rows == 1, 1 < rows <= FEW_ROWS and q_heads <= FEW_QUERIES * kv_heads
    return plain._replace(least_tiles=2 if alone else 3, rotates=int(rotates))


def cut_in(splits: int, head_size: int, element_bytes: int) -> Config:
    """The same for any number of rows."""
    if element_bytes == 4:
        return Config(16, 4, 2, splits)
    return Config(64, 4, 2, splits) if head_size <= 128 else Config(32, 4, 2, splits)


def choose_splits(rows: int, kv_heads: int, positions: int, device: torch.device, least: int = 1) -> int:
    """Shares of a row for three programs a multiprocessor, or two of each row. Attention alone is fastest so on an H200, with 1 to 64 rows
    of 8 KV heads; in whole layers of 2 to 32 rows fewer shares are, which its table has.

    positions: the most that the page table can hold. One row of 8,192: 17 us in 32 shares, 21 in 16.
    least: where positions allow it, for batches of which most rows may be nobody's.
    """
    programs, room = max(rows * kv_heads, 1), multiprocessors(device)
    if programs > MAX_COUNTERS:
        return 1
    shares = 3 * room // programs
    if shares < 4:
        shares = 2 if programs <= 2 * room else 1
    return max(min(max(shares, least), positions // LEAST_POSITIONS, MAX_SPLITS), 1)


class Cut(NamedTuple):
    tuned: Config
    partial: Tensor  # float32: room for what the shares leave
    chunk: int  # shares that are put together at a time
    heads_block: int
    head_block: int


def cut(q: Tensor, kv_heads: int, positions: int, splits: int | None, tuned: Config | None) -> Cut:
    """How rows q `[B, Q, H]`, B > 0, are cut: as tuned says, else in so many splits, else by `config`; positions: as there.

    Raises ValueError for too many splits.
    """
    rows, q_heads, head_size = q.shape
    if tuned is None:
        shape = rows, q_heads, kv_heads, head_size, positions
        tuned = cut_in(splits, head_size, q.element_size()) if splits else config(q.device, q.dtype, *shape)
    splits = tuned.splits
    if splits > 1 and rows * kv_heads > MAX_COUNTERS:
        raise ValueError(f"splits must be 1 for {rows} rows of {kv_heads} KV heads, got {splits}")
    partial = q.new_empty(rows * splits * q_heads * (head_size + 2) if splits > 1 else 0, dtype=torch.float32)
    heads_block, head_block = next_power_of_2(q_heads // kv_heads), next_power_of_2(head_size)
    chunk = max(min(next_power_of_2(splits), tuned.warps * CHUNK_OF_WARP // (heads_block * head_block)), 1)
    return Cut(tuned, partial, chunk, heads_block, head_block)
