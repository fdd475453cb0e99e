"""What searches for configurations share: a pool that compiles candidates, and the table of this GPU that is renewed."""

import copy
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import triton

from benchmarks.candidates import Product
from benchmarks.launches import DTYPE
from kernels.linear import MAX_ROWS
from kernels.skinny_linear import Config
from kernels.tuning import bits, file_name, forget, tables

PROCESSES = 14  # that compile at the same time


def compilers() -> ProcessPoolExecutor:
    """PROCESSES that compile into the cache that all processes share."""
    return ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn"))


class RenewedTable:
    """That of this GPU as it stands: what is put into `entries` is written to a folder of its own, to be copied to kernels/.

    These are of the Triton that runs; those of other versions stay beside them.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._tables = copy.deepcopy(tables(torch.device("cuda", 0)))
        self.entries = self._tables.setdefault(triton.__version__, {}).setdefault(bits(DTYPE), {})
        self.path = folder / file_name(torch.cuda.get_device_name())

    def put(self, operation: str, shape: str, rows: int, entry: list[int]) -> None:
        self.entries.setdefault(operation, {}).setdefault(shape, {})[str(rows)] = entry

    def put_product(self, each: Product, rows: int, tuned: Config | None) -> None:
        """None: the library's. Nothing is written of more rows than our kernel is considered for."""
        if rows <= MAX_ROWS:
            self.put(each.operation, each.shape, rows, list(tuned or ()))

    def serve(self) -> None:
        """Has the operations of this process take what is in `entries` now."""
        tables(torch.device("cuda", 0)).update(self._tables)
        forget()

    def write(self) -> None:
        self.path.write_text(json.dumps(self._tables, indent=1, sort_keys=True) + "\n")
