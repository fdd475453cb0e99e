"""Loads a rank's shard of a checkpoint: this rank's bytes only, each read once, never a whole tensor or file in memory.

A few threads read pieces of at most PIECE_BYTES, convert them and copy them to where they belong: that is the read-ahead, and
its bound. They read by offset rather than map the file: an error of a network volume is an exception then, not a SIGBUS.
"""

import logging
import math
import mmap
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.engine.interface import Progress
from services.worker.weights.folder import ModelFolder
from services.worker.weights.shards import Piece, Shard, pieces
from services.worker.weights.stored import DTYPE_BYTES, StoredTensor
from shared.errors import ConfigError

logger = logging.getLogger(__name__)

READERS = 4  # threads
PIECE_BYTES = 4 << 20
PAGE_BYTES = 4096  # what lies less than this apart is in one read: the kernel fetches whole pages anyway
LISTED = 5  # names of each kind in an error
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load(folder: ModelFolder, shards: Iterable[Shard], progress: Progress, ignores: Callable[[str], bool]) -> None:
    """Fills every shard's target. Raises ConfigError naming all tensors that are missing, misshapen or left over.

    ignores: whether a tensor of that name may be left over.
    """
    wanted = list(shards)
    _check(folder, wanted, ignores)
    wanted.sort(key=lambda shard: (folder.tensors[shard.name].file, folder.tensors[shard.name].offset))
    reads = [read for shard in wanted for read in _reads(folder.tensors[shard.name], shard)]
    total, done, start_s = sum(read.bytes for read in reads), 0, time.monotonic()
    progress("loading weights", 0.0)
    with ExitStack() as stack:
        descriptors: dict[object, int] = {}
        for read in reads:
            if read.stored.file not in descriptors:
                descriptors[read.stored.file] = stack.enter_context(read.stored.file.open("rb", buffering=0)).fileno()
        pool = stack.enter_context(ThreadPoolExecutor(READERS, "weights"))
        stack.callback(pool.shutdown, cancel_futures=True)  # first: after an error no further piece is read
        futures = {pool.submit(_fill, read, descriptors[read.stored.file]): read.bytes for read in reads}
        for future in as_completed(futures):
            future.result()
            done += futures[future]
            progress("loading weights", done / total)
    logger.info("read %d MB of weights in %.1f s", total // 10**6, time.monotonic() - start_s)


def _check(folder: ModelFolder, shards: list[Shard], ignores: Callable[[str], bool]) -> None:
    stored, wanted = folder.tensors, {shard.name: shard for shard in shards}
    held = [shard for name, shard in wanted.items() if name in stored]
    faults = {
        "missing": sorted(wanted.keys() - stored.keys()),
        "not of this architecture": sorted(name for name in stored.keys() - wanted.keys() if not ignores(name)),
        "of another shape than the config's": [
            f"{shard.name} {list(stored[shard.name].shape)} instead of {list(shard.shape)} in {stored[shard.name].file.name}"
            for shard in held
            if stored[shard.name].shape != shard.shape
        ],
        f"of another dtype than {', '.join(DTYPES)} (quantised checkpoints are not supported)": [
            f"{shard.name} {stored[shard.name].dtype} in {stored[shard.name].file.name}"
            for shard in held
            if stored[shard.name].dtype not in DTYPES
        ],
    }
    told = [f"tensors {fault}: {_listed(names)}" for fault, names in faults.items() if names]
    if told:
        raise ConfigError(f"{folder.path}: {'; '.join(told)}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


@dataclass(frozen=True)
class _Read:
    """One piece: runs of equal length, of which `keep` goes to the target."""

    stored: StoredTensor
    shape: tuple[int, ...]  # of what is read
    starts: NDArray[np.int64]  # of each run, in bytes from the file's start
    run_bytes: int
    keep: tuple[slice, ...]
    target: Tensor

    @property
    def bytes(self) -> int:
        return len(self.starts) * self.run_bytes


def _reads(stored: StoredTensor, shard: Shard) -> list[_Read]:
    itemsize, read = DTYPE_BYTES[stored.dtype], _widened(stored, shard.ranges)
    limit = max(1, PIECE_BYTES // itemsize * _count(shard.ranges) // max(1, _count(read)))
    return [_read(stored, piece) for piece in pieces(shard.ranges, shard.target, limit)]


def _read(stored: StoredTensor, piece: Piece) -> _Read:
    """How to read a piece: up to the last dimension that is not whole, every row is a run of its own."""
    ranges, strides = _widened(stored, piece.ranges), _strides(stored)
    keep = [slice(part.start - wide.start, part.stop - wide.start) for part, wide in zip(piece.ranges, ranges, strict=True)]
    last = _last_partial(stored, ranges)
    rows = [np.array(ranges[axis]) * strides[axis] for axis in range(last)]
    first = np.array([stored.offset + ranges[last].start * strides[last]])
    starts = reduce(np.add.outer, [*rows, first]).reshape(-1)
    return _Read(stored, tuple(map(len, ranges)), starts, len(ranges[last]) * strides[last], tuple(keep), piece.target)


def _widened(stored: StoredTensor, ranges: tuple[range, ...]) -> tuple[range, ...]:
    """What is read to have `ranges`: also what lies between its rows, if that is less than a page."""
    last = _last_partial(stored, ranges)
    gap_bytes = (stored.shape[last] - len(ranges[last])) * _strides(stored)[last]
    if gap_bytes >= PAGE_BYTES or _count(ranges[:last]) == 1:
        return ranges
    return (*ranges[:last], range(stored.shape[last]), *ranges[last + 1 :])


def _last_partial(stored: StoredTensor, ranges: tuple[range, ...]) -> int:
    """The last dimension of which not all is wanted; 0 if all of all is."""
    return max((axis for axis, part in enumerate(ranges) if len(part) < stored.shape[axis]), default=0)


def _strides(stored: StoredTensor) -> list[int]:
    """In bytes."""
    return [math.prod(stored.shape[axis + 1 :]) * DTYPE_BYTES[stored.dtype] for axis in range(len(stored.shape))]


def _count(ranges: tuple[range, ...]) -> int:
    return math.prod(map(len, ranges))


def _fill(read: _Read, descriptor: int) -> None:
    """Reads, converts and copies one piece."""
    stored, size = read.stored, read.run_bytes
    memory = mmap.mmap(-1, read.bytes)  # not from malloc, which would keep it: some 15 MB a thread
    content = torch.frombuffer(memory, dtype=DTYPES[stored.dtype]).view(read.shape)
    buffer = memoryview(memory)
    try:
        if len(read.starts) > 1:  # so that the kernel fetches in large requests, though we read row by row
            first = int(read.starts[0])
            os.posix_fadvise(descriptor, first, int(read.starts[-1]) + size - first, os.POSIX_FADV_WILLNEED)
        for number, start in enumerate(read.starts.tolist()):
            _read_whole(descriptor, buffer[number * size : (number + 1) * size], start)
    except (OSError, EOFError) as error:
        raise ConfigError(f"{stored.file}: cannot read {stored.name}: {error}") from error
    read.target.copy_(content[read.keep])


def _read_whole(descriptor: int, buffer: memoryview, start: int) -> None:
    while buffer:
        count = os.preadv(descriptor, [buffer], start)
        if not count:
            raise EOFError(f"the file ends at byte {start}")
        buffer, start = buffer[count:], start + count
