"""Which of the library's two products is faster, cuBLAS or cuBLASLt, for the shapes of models: `python -m benchmarks tune-library`.

cuBLASLt is compared with what the tables choose without it, a kernel of ours or cuBLAS, in turns, each behind the norm of its rows as in
`benchmarks.tune`. Where it wins by more than noise it is written to the table of this GPU (`kernels/tuning_*.json`), in place of ours.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.candidates import Product, products
from benchmarks.products import Inputs
from benchmarks.report import Report, Value
from benchmarks.tuning import RenewedTable
from kernels.library import preferring
from shared.errors import ConfigError

ROWS = (8, 16, 32, 64, 128, 256)
TURNS, REPLAYS = 3, 20
GAIN = 0.98  # of the time without it, that cuBLASLt must stay below


def tune_library(models: Sequence[str], rows: Sequence[int], ranks: Sequence[int], out: Path) -> Report:
    """Needs a GPU. ranks: the sizes of groups whose ranks' shapes are measured. Raises ConfigError without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError("the library's products are measured on a GPU, and none is here")
    renewed = RenewedTable(out)
    shapes = dict.fromkeys(each for size in ranks for model in models for each in products(model, size))
    lines = [_decide(each, count, renewed) for each in shapes for count in rows]
    renewed.write()
    return Report(
        name="tune-library",
        columns=("operation", "shape", "rows", "without", "us", "cuBLASLt us", "winner"),
        rows=lines,
        notes=(f"the table is in {renewed.path}: copy it to kernels/",),
    )


def _decide(each: Product, rows: int, renewed: RenewedTable) -> Sequence[Value]:
    """A line of the report; what was found is in the table."""
    inputs, tuned = Inputs(each, rows), each.config(rows)
    times_us, lt_times_us = [], []
    for _ in range(TURNS):
        with preferring("cublas"):
            times_us.append(inputs.us(tuned, REPLAYS))
        with preferring("cublaslt"):
            lt_times_us.append(inputs.us(None, REPLAYS))
    us, lt_us = min(times_us), min(lt_times_us)
    won, without = lt_us < GAIN * us, "cuBLAS" if tuned is None else "ours"
    renewed.put("library", each.library_shape, rows, [1] if won else [])
    if won:
        renewed.put_product(each, rows, None)
    return each.operation, each.shape, rows, without, us, lt_us, "cuBLASLt" if won else without
