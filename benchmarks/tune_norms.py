"""Times the two products around a norm: with its kernel between them, and without it (`kernels.skinny_linear`)."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, cycle
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.candidates import Join, reading_ahead
from benchmarks.launches import DTYPE, time_launches
from benchmarks.products import EPS, Inputs, ours
from benchmarks.report import Value
from kernels.linear import config_of, gated_linear_torch, linear_torch
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.skinny_linear import Config, linear_add_norm_triton, linear_triton
from kernels.tuning import Table

REPLAYS = 20
ASKING_GAIN = 0.995  # of the time without, that asking ahead must stay below


class Around(NamedTuple):
    """The two products around a norm of so many rows."""

    join: Join
    rows: int
    writer: Config
    reader: Config

    def separate(self, x: Tensor, first: Tensor, residual: Tensor, norm: Tensor, second: Tensor) -> Tensor:
        y = add_rms_norm(linear_triton(x, first, None, self.writer), residual, norm, EPS)
        return ours(self.join.reader, y, second, self.reader)

    def fused(self, x: Tensor, first: Tensor, residual: Tensor, norm: Tensor, second: Tensor) -> Tensor:
        return ours(self.join.reader, linear_add_norm_triton(x, first, None, residual, norm, EPS, self.writer), second, self.reader)


def around_norm(join: Join, rows: int, tuned_table: Table) -> list[Around]:
    """One, where the table has both products for so many rows."""
    entries = [tuned_table.get(each.operation, {}).get(each.shape, {}) for each in join]
    writer, reader = (config_of(each, rows) for each in entries)
    return [] if writer is None or reader is None or not entries[1].get(str(rows)) else [Around(join, rows, writer, reader)]


def _asking(around: Around) -> tuple[list[Around], list[Around]]:
    """With the second product's weights asked for ahead, and with the first one's."""
    readers, writers = reading_ahead(around.join.reader, around.reader), reading_ahead(around.join.writer, around.writer)
    return [around._replace(reader=each) for each in readers], [around._replace(writer=each) for each in writers]


def compile_around(around: Around) -> None:
    """Compiles the fused kernels, into the cache that all processes share."""
    inputs = [Inputs(each, around.rows, copies=1) for each in around.join]
    residual, norm = (torch.zeros(count, around.join.writer.columns, device="cuda", dtype=DTYPE) for count in (around.rows, 1))
    for each in (around, *chain(*_asking(around))):
        each.fused(inputs[0].x, inputs[0].weights[0], residual, norm[0], inputs[1].weights[0])


def decide_norm(around: Around, tuned_table: Table) -> Sequence[Value]:
    """Times both ways, each behind the one before, so that a product follows a product as in a layer; the fused one also with weights asked
    for ahead. Where it is faster, this is noted in the entries; a line of the report.

    One whose sums are not those of the separate kernels, bit by bit, is told of and not taken.
    """
    (writer, reader), rows = around.join, around.rows
    inputs = [Inputs(each, rows) for each in around.join]
    x, norm = inputs[0].x, 1 + torch.randn(writer.columns, device="cuda", dtype=DTYPE) / 8
    pairs = list(zip(*(cycle(each.weights) for each in inputs), range(max(len(each.weights) for each in inputs)), strict=False))
    residual = torch.ones(rows, writer.columns, device="cuda", dtype=DTYPE)

    def us(way: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]) -> float:
        return time_launches([partial(way, x, a, residual, norm, b) for a, b, _ in pairs], REPLAYS).median_us

    def fastest(asking: Iterable[Around], best: tuple[float, Around]) -> tuple[float, Around]:
        faster = min(((us(each.fused), each) for each in asking), default=best, key=itemgetter(0))
        return faster if faster[0] < ASKING_GAIN * best[0] else best

    right, errors = _compare(around, inputs, norm)
    separate_us = us(around.separate)
    best = fastest(_asking(around)[0], (us(around.fused), around))
    fused_us, found = fastest(_asking(best[1])[1], best)
    won = right and fused_us < separate_us
    if won:
        tuned_table[writer.operation][writer.shape][str(rows)] = list(found.writer)
        tuned_table[reader.operation][reader.shape][str(rows)] = list(found.reader._replace(reads_unscaled=1))
    shapes, ahead = f"{writer.shape} {reader.shape}", f"ahead {found.writer.prefetch} {found.reader.prefetch}, errors {errors}"
    print(f"norm {shapes} M={rows}: separate {separate_us:.2f}, fused {best[0]:.2f}, {fused_us:.2f} us, {ahead}", flush=True)
    rate = (writer.weight_bytes + reader.weight_bytes) / min(separate_us, fused_us) / 1e6
    return "norm", shapes, rows, separate_us, fused_us, "fused" if won else "separate", rate, ahead


def _compare(around: Around, inputs: Sequence[Inputs], norm: Tensor) -> tuple[bool, str]:
    """Whether the sums of both ways are equal and the fused one's result is as near to float32's; mean errors over mean results."""
    first, second = (each.weights[0] for each in inputs)
    ways, sums = (around.separate, around.fused), [torch.ones(around.rows, len(first), device="cuda", dtype=DTYPE) for _ in range(2)]
    got = [way(inputs[0].x, first, residual, norm, second).float() for way, residual in zip(ways, sums, strict=True)]
    exact = rms_norm(sums[0].float(), norm.float(), EPS)
    expected = (gated_linear_torch if around.join.reader.gated else linear_torch)(exact, second.float())
    errors = [float((y - expected).abs().mean() / expected.abs().mean()) for y in got]
    right = torch.equal(*sums) and errors[1] < 1.1 * errors[0]
    if not right:
        print(f"WRONG: {around}, errors {errors}", flush=True)
    return right, f"{errors[0]:.2e} {errors[1]:.2e}"
