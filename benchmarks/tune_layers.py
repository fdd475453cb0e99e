"""Which of the fastest configurations of each product make whole layers fastest: the end of `python -m benchmarks tune`.

A product that wins alone may lose in a layer, where it counts what it holds while its neighbours start and end, and whether the norm
between two of them has a kernel of its own. So a layer's products are gone through in turn, each with the others as the table has them.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.candidates import Product, joins, products, shape_of
from benchmarks.kernels import ExpertLayer, KVCache, Layer
from benchmarks.launches import time_launches
from benchmarks.report import Value
from benchmarks.tuning import RenewedTable
from kernels.skinny_linear import Config

PASSES = 2  # over the products of a layer
COPIES = 8  # of a layer, whose weights and caches memory holds
LENGTHS = (1024, 1152)
REPLAYS, TURNS, NEAREST = 15, 3, 2
GAIN = 0.997  # of the layer's time, that another choice must stay below


class Choice(NamedTuple):
    """What computes a product: a configuration, or one of the library's two."""

    tuned: Config | None
    is_lt: bool = False

    def __str__(self) -> str:
        return str([*self.tuned]) if self.tuned else "cuBLASLt" if self.is_lt else "cuBLAS"


Choices = dict[Product, Choice]


def choices_of(model: str, rows: int) -> Choices:
    """By the tables that serve now."""
    return {each: Choice(each.config(rows), each.is_lt_faster(rows)) for each in products(model)}


class LayerTuner:
    """A model's layer of so many rows, whose table is renewed."""

    def __init__(self, model: str, rows: int, renewed: RenewedTable) -> None:
        self.model, self.rows, self.renewed = model, rows, renewed
        self.readers = {join.reader for join in joins(model)}  # whose norm the product before may begin

    def decide(self, before: Choices, finalists: Mapping[Product, Sequence[Config]]) -> list[Sequence[Value]]:
        """Puts what makes the layer fastest into the table; lines of the report.

        It starts from what the table has or from what was there before, whichever is faster. finalists: of each product.
        """
        self.renewed.serve()
        starts = before, choices_of(self.model, self.rows)
        layers, lines = layers_of(self.model, self.rows), list[Sequence[Value]]()

        def us(choices: Choices) -> float:
            self._put(choices)
            return time_layers(layers)

        def us_with(each: Product, choice: Choice) -> float:
            return us({**now, each: choice})

        times = [min(us(start) for _ in range(TURNS)) for start in starts]
        now = dict(starts[times.index(min(times))])
        print(f"layer of {self.model}, M={self.rows}: before {times[0]:.2f} us, by the fastest products {times[1]:.2f}", flush=True)
        for _ in range(PASSES):
            begun = dict(now)
            for each in begun:
                tried = dict.fromkeys([before[each], *self._choices(each, finalists.get(each, ()))])
                nearest = sorted(tried, key=partial(us_with, each))[:NEAREST]
                turns = [[us_with(each, choice) for choice in (now[each], *nearest)] for _ in range(TURNS)]
                now_us, *others_us = map(min, zip(*turns, strict=True))
                best = others_us.index(min(others_us))
                won = nearest[best] != now[each] and others_us[best] < GAIN * now_us
                print(f"  {each.shape}: {now_us:.2f} us by {now[each]}, {others_us[best]:.2f} by {nearest[best]}", flush=True)
                kind, winner = f"layer of {self.model}", "taken" if won else "kept"
                lines.append((kind, each.shape, self.rows, now_us, others_us[best], winner, None, str(nearest[best])))
                if won:
                    now[each] = nearest[best]
            if now == begun:
                break
        now_us = min(us(now) for _ in range(TURNS))
        self._put(now)
        print(f"layer of {self.model}, M={self.rows}: {now_us:.2f} us", flush=True)
        return lines

    def _choices(self, each: Product, finalists: Sequence[Config]) -> list[Choice]:
        flags = (0, 1) if each in self.readers else (0,)
        ours = [Choice(tuned._replace(reads_unscaled=flag)) for tuned in finalists for flag in flags]
        return [*ours, Choice(None), Choice(None, is_lt=True)]

    def _put(self, choices: Choices) -> None:
        for each, (tuned, is_lt) in choices.items():
            self.renewed.put(each.operation, each.shape, self.rows, list(tuned or ()))
            self.renewed.put("library", f"{each.weight_rows}x{each.size}", self.rows, [1] if is_lt else [])
        self.renewed.serve()


def time_layers(layers: Sequence[Layer]) -> float:
    """Microseconds of one, as the tables have it now."""
    for layer in layers:
        layer.prepare()
    return time_launches([*layers], REPLAYS).median_us


def layers_of(model: str, rows: int) -> list[Layer]:
    """With weights and caches of their own."""
    shape = shape_of(model)
    cache = KVCache(rows, shape.kv_heads, shape.head_dim, *LENGTHS, COPIES)
    sizes = rows, shape.hidden_size, shape.heads, shape.kv_heads, shape.intermediate_size, cache
    if shape.experts == 1:
        return [Layer(*sizes, slots) for slots in cache.slots]
    return [ExpertLayer(*sizes, slots, shape.experts, shape.experts_per_token) for slots in cache.slots]
