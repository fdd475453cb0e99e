"""Which of the fastest configurations of each product make whole layers fastest: the end of `python -m benchmarks tune`.

A product that wins alone may lose in a layer, where it counts what it holds while its neighbours start and end, and whether the norm
between two of them has a kernel of its own. So a layer's products are gone through in turn, each with the others as the table has them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import NamedTuple, TypeVar

from benchmarks.candidates import Product, joins, products, shape_of
from benchmarks.kernels import ExpertLayer, KVCache, Layer
from benchmarks.launches import time_launches
from benchmarks.report import Value
from benchmarks.tuning import RenewedTable
from kernels.skinny_linear import Config

PASSES = 2  # over the products of a layer
COPIES = 8  # of a layer, whose weights and caches memory holds
LENGTHS = (1024, 1152)
REPLAYS, TURNS, NEAREST = 15, 5, 3  # a turn is a capture of its own: the same layers differ by some per cent from one to another
GAIN = 0.997  # of the layer's time, that another choice must stay below


class Choice(NamedTuple):
    """What computes a product: a configuration, or one of the library's two."""

    tuned: Config | None
    is_lt: bool = False

    def __str__(self) -> str:
        return str([*self.tuned]) if self.tuned else "cuBLASLt" if self.is_lt else "cuBLAS"


Choices = dict[Product, Choice]
T = TypeVar("T")


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

        times = [mean(us(start) for _ in range(TURNS)) for start in starts]
        now = dict(starts[times.index(min(times))])
        print(f"layer of {self.model}, M={self.rows}: before {times[0]:.2f} us, by the fastest products {times[1]:.2f}", flush=True)
        for _ in range(PASSES):
            begun = dict(now)
            for each in begun:
                tried = dict.fromkeys([before[each], *self._choices(each, finalists.get(each, ()))])
                now_us, best, best_us = beside(now[each], tried, partial(us_with, each), NEAREST)
                won = best != now[each] and best_us < GAIN * now_us
                print(f"  {each.shape}: {now_us:.2f} us by {now[each]}, {best_us:.2f} by {best}", flush=True)
                kind, winner = f"layer of {self.model}", "taken" if won else "kept"
                lines.append((kind, each.shape, self.rows, now_us, best_us, winner, None, str(best)))
                if won:
                    now[each] = best
            if now == begun:
                break
        now_us = mean(us(now) for _ in range(TURNS))
        self._put(now)
        print(f"layer of {self.model}, M={self.rows}: {now_us:.2f} us", flush=True)
        return lines

    def _choices(self, each: Product, finalists: Sequence[Config]) -> list[Choice]:
        flags = (0, 1) if each in self.readers else (0,)
        ours = [Choice(tuned._replace(reads_unscaled=flag)) for tuned in finalists for flag in flags]
        return [*ours, Choice(None), Choice(None, is_lt=True)]

    def _put(self, choices: Choices) -> None:
        for each, (tuned, is_lt) in choices.items():
            self.renewed.put_product(each, self.rows, tuned)
            self.renewed.put("library", each.library_shape, self.rows, [1] if is_lt else [])
        self.renewed.serve()


def beside(now: T, others: Iterable[T], us: Callable[[T], float], finalists: int) -> tuple[float, T, float]:
    """What `now` takes, and the fastest of the others with its time: of all, timed once, the fastest few are timed in turns with it."""
    nearest = sorted(others, key=us)[:finalists]
    turns = [[us(each) for each in (now, *nearest)] for _ in range(TURNS)]
    now_us, *others_us = map(mean, zip(*turns, strict=True))
    return now_us, nearest[others_us.index(min(others_us))], min(others_us)


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
