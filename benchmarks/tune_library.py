"""Which of the library's two products is faster, cuBLAS or cuBLASLt, for the shapes of models: `python -m benchmarks tune-library`.

Each is timed twice, in turns, over replays of a graph whose weights rotate through memory. What cuBLASLt wins by more than noise is written
to the table of this GPU (`kernels/tuning_*.json`).
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.candidates import products
from benchmarks.launches import L2_BYTES, randn, time_launches
from benchmarks.report import Report, Value
from benchmarks.tuning import RenewedTable
from kernels.library import MEASURED_ROWS
from shared.errors import ConfigError

LIBRARIES = ("cublas", "cublaslt")
TURNS = 2
GAIN = 0.98  # of cuBLAS's time, that cuBLASLt must stay below


def tune_library(models: Sequence[str], ranks: Sequence[int], out: Path) -> Report:
    """Needs a GPU. ranks: the sizes of groups whose ranks' shapes are measured. Raises ConfigError without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("the library's products are measured on a GPU, and none is here")
    renewed, lines = RenewedTable(out), []
    table = renewed.entries.setdefault("library", {})
    shapes = dict.fromkeys(
        (each.columns * (2 if each.gated else 1), each.size) for size in ranks for model in models for each in products(model, size)
    )
    for columns, size in shapes:
        found = [_faster(columns, size, rows) for rows in MEASURED_ROWS]
        lines += [(f"{columns}x{size}", *line) for line in found]
        table.pop(f"{columns}x{size}", None)
        if any(winner == LIBRARIES[1] for *_, winner in found):
            table[f"{columns}x{size}"] = {str(rows): [1] if winner == LIBRARIES[1] else [] for rows, _, _, winner in found}
    renewed.write()
    return Report(
        name="tune-library",
        columns=("shape", "rows", "cuBLAS us", "cuBLASLt us", "winner"),
        rows=lines,
        notes=(f"the table is in {renewed.path}: copy it to kernels/",),
    )


def _faster(columns: int, size: int, rows: int) -> tuple[int, float, float, Value]:
    weights = [randn(columns, size) for _ in range(2 + 2 * L2_BYTES // (2 * columns * size))]
    x = randn(rows, size)
    times: dict[str, list[float]] = {library: [] for library in LIBRARIES}
    before = torch.backends.cuda.preferred_blas_library()
    for library in LIBRARIES * TURNS:
        torch.backends.cuda.preferred_blas_library(library)
        times[library].append(time_launches([partial(F.linear, x, weight) for weight in weights]).median_us)
    torch.backends.cuda.preferred_blas_library(before)
    usual_us, lt_us = (min(times[library]) for library in LIBRARIES)
    return rows, usual_us, lt_us, LIBRARIES[lt_us < GAIN * usual_us]
