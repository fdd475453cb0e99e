"""How decode attention of few rows is cut, for the shapes of models: `python -m benchmarks tune-attention`.

What attention gains or loses is seen in whole layers, with the rotation apart and within: what it holds while its neighbours start and end
counts. What makes them fastest is written to the table of this GPU (`kernels/tuning_*.json`).
"""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.candidates import shape_of
from benchmarks.launches import DTYPE, randn
from benchmarks.report import Report, Value
from benchmarks.tune_layers import GAIN, beside, layers_of, time_layers
from benchmarks.tuning import PROCESSES, RenewedTable
from kernels.compilation import compile_noted, noting
from kernels.decode_splits import LEAST_POSITIONS, MAX_SPLITS, Config, config
from shared.errors import ConfigError

# Shares by rows: as many as there are, since programs without one keep the next kernel from starting early. Of the rows that are timed here
# 32 are 9.
SHARES = {1: (4, 6, 32), 2: (3, 4, 6, 9), 4: (3, 4, 6, 9), 8: (2, 3, 4, 6), 16: (1, 2, 3, 4), 24: (1, 2, 3), 32: (1, 2, 3), 64: (1, 2)}
TILES = ((64, 4, 2), (64, 4, 3), (64, 8, 3), (128, 8, 2), (32, 4, 3))  # positions, warps, stages
MANY_ROWS = 8  # from which other tiles than the first are tried
WHOLE_POSITIONS, CUT = 1536, 4  # where rows of no more than these are whole, longer ones have up to so many shares
NEAREST = 3
TOLERANCE = 3e-2


def tune_attention(models: Sequence[str], rows: Sequence[int], out: Path) -> Report:
    """Needs a GPU. Raises ConfigError without one."""
    if not torch.cuda.is_available():
        raise ConfigError("attention is tuned on a GPU, and none is here")
    renewed, lines = RenewedTable(out), list[Sequence[Value]]()
    for model, count in product(models, rows):
        before, before_us, best, best_us = _decide(model, count, renewed)
        print(f"{model} M={count}: layer {before_us:.2f} us by {[*before]}, {best_us:.2f} by {[*best]}", flush=True)
        lines.append((model, count, before_us, str([*before]), best_us, str([*best])))
        renewed.write()
    return Report(
        name="tune-attention",
        columns=("model", "rows", "layer before us", "configuration", "layer us", "configuration now"),
        rows=lines,
        notes=(f"the table is in {renewed.path}: copy it to kernels/",),
    )


def candidates(rows: int) -> Iterator[Config]:
    """For the least number of rows that SHARES has and that is not below these."""
    shares = next((each for most, each in SHARES.items() if rows <= most), (1,))
    for (block, warps, stages), splits, rotates in product(TILES if rows >= MANY_ROWS else TILES[:1], shares, (0, 1)):
        most, least_tiles = (splits, 2) if splits > 1 else (CUT, WHOLE_POSITIONS // block)
        yield Config(block, warps, stages, most, least_tiles, rotates)


def before_of(rows: int, heads: tuple[int, int, int]) -> Config:
    """By the table that serves now or by the rules: with all shares that a long row may have, more than rows that are timed here can."""
    return config(torch.device("cuda", 0), DTYPE, rows, *heads, MAX_SPLITS * LEAST_POSITIONS)


def _decide(model: str, rows: int, renewed: RenewedTable) -> tuple[Config, float, Config, float]:
    """Puts the best into the table: what was there before, and what is now, with the times of a layer."""
    shape = shape_of(model)
    heads = shape.heads, shape.kv_heads, shape.head_dim
    renewed.serve()
    layers, before = layers_of(model, rows), before_of(rows, heads)

    def put(tuned: Config) -> None:
        renewed.put("decode_attention", "x".join(map(str, heads)), rows, [*tuned])
        renewed.serve()

    def us(tuned: Config) -> float:
        put(tuned)
        return time_layers(layers)

    tried = list(dict.fromkeys([before, *candidates(rows)]))
    with noting() as noted:
        for tuned in tried:
            put(tuned)
            layers[0]()
    compile_noted(noted, torch.device("cuda", 0), PROCESSES, lambda share: None)
    qkv = randn(rows, sum(layers[0].counts) * shape.head_dim)
    put(before)
    expected = layers[0].attend(qkv)
    fitting = []
    for tuned in tried:
        put(tuned)
        try:
            y = layers[0].attend(qkv)
        except OutOfResources:
            continue
        if torch.allclose(y, expected, rtol=TOLERANCE, atol=TOLERANCE):
            fitting.append(tuned)
        else:
            print(f"WRONG: {tuned} of {rows} rows", flush=True)
    before_us, best, best_us = beside(before, fitting, us, NEAREST)
    if best_us >= GAIN * before_us:
        best, best_us = before, before_us
    put(best)
    return before, before_us, best, best_us
