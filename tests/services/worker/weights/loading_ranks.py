"""`python -m tests.services.worker.weights.loading_ranks FOLDER RANKS`: every rank a process that loads its shard, all at once.

Prints what that took each of them, as JSON.
"""

import json
import multiprocessing
import os
import sys
import threading
from itertools import pairwise
from pathlib import Path

from benchmarks.driver import spec
from services.worker.distributed.communicator import SingleCommunicator
from services.worker.engine.engine import TorchEngine
from services.worker.weights.folder import ModelFolder


class Absent(SingleCommunicator):
    """A place in a group whose other members are not here: enough to load a model, not to run it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Watcher:
    """The largest anonymous memory of this process, looked at every 2 ms."""

    def start(self) -> None:
        self.own_bytes = 0  # that looking has read
        self.peak_bytes = self.before_bytes = self._look()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def end(self) -> int:
        """How much memory grew, at most."""
        self._ended.set()
        self._thread.join()
        return max(self.peak_bytes, self._look()) - self.before_bytes

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, self._look())

    def _look(self) -> int:
        status = Path("/proc/self/status").read_text()
        self.own_bytes += len(status)
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def kernel_read_bytes() -> int:
    """All that this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def load_rank(path: str, rank: int, ranks: int) -> dict[str, int]:
    reads: list[tuple[int, int]] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        reads.append((offset, offset + count))
        return count

    os.preadv = counted  # type: ignore[assignment]
    watcher = Watcher()
    kernel_bytes = grown_bytes = 0

    def progress(phase: str, part: float) -> None:
        nonlocal kernel_bytes, grown_bytes
        if (phase, part) == ("loading weights", 0.0):
            watcher.start()
            kernel_bytes = -kernel_read_bytes()
        elif phase != "loading weights" and not grown_bytes:
            grown_bytes = watcher.end()
            kernel_bytes += kernel_read_bytes() - watcher.own_bytes

    engine = TorchEngine(spec(Path(path), rank=rank, ranks=ranks), progress, Absent(rank, ranks))
    slices = [shard.target.nbytes for shard in engine.model.shards(ModelFolder(Path(path)).tensors.keys())]
    reads.sort()
    return {
        "grown_bytes": grown_bytes,
        "shard_bytes": sum(slices),
        "largest_slice_bytes": max(slices),
        "read_bytes": sum(end - start for start, end in reads),
        "read_twice_bytes": sum(max(0, end - start) for (_, end), (start, _) in pairwise(reads)),
        "kernel_read_bytes": kernel_bytes,
    }


def main() -> None:
    path, ranks = sys.argv[1], int(sys.argv[2])
    with multiprocessing.get_context("fork").Pool(ranks) as pool:  # torch is imported once, and has no threads yet
        print(json.dumps(pool.starmap(load_rank, [(path, rank, ranks) for rank in range(ranks)], chunksize=1)))


if __name__ == "__main__":
    main()
