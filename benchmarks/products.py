"""How the products of few rows are launched and timed, with weights that come from memory."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.candidates import Product
from benchmarks.launches import DTYPE, L2_BYTES, time_launches
from kernels.rms_norm import Unscaled, rms_norm
from kernels.silu_and_mul import silu_and_mul
from kernels.skinny_linear import Config, gated_linear_triton, linear_triton, widened_linear_triton

MAX_WEIGHT_BYTES = 2**30  # of the rotating copies
TOLERANCE = 3e-2
EPS = 1e-6


def launches_of(each: Product, x: Tensor, weights: Sequence[Tensor], tuned: Config | None) -> Sequence[Callable[[], Tensor]]:
    """One for each copy of the weights; None: the library's, with the activation after it."""
    if tuned is None:
        return [partial(_library, each, x, weight) for weight in weights]
    return [partial(ours, each, x, weight, tuned) for weight in weights]


def ours(each: Product, x: Tensor | Unscaled, weight: Tensor, tuned: Config) -> Tensor:
    if each.is_head:
        assert isinstance(x, Tensor)
        return widened_linear_triton(x, weight, tuned)
    return gated_linear_triton(x, weight, None, tuned) if each.gated else linear_triton(x, weight, None, tuned)


def _library(each: Product, x: Tensor, weight: Tensor) -> Tensor:
    if each.is_head:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    y = F.linear(x, weight)
    return silu_and_mul(y) if each.gated else y


def behind_norm(launch: Callable[[], Tensor], norm: Callable[[], Tensor]) -> None:
    """As in a layer: the memory is idle for a moment before."""
    norm()
    launch()


def runs(each: Product, x: Tensor, weight: Tensor, tuned: Config) -> bool:
    try:
        ours(each, x, weight, tuned)
    except OutOfResources as error:
        print(f"{each} {tuned}: {error}", flush=True)
        return False
    return True


class Timed(NamedTuple):
    us: float
    tuned: Config


class Inputs:
    """Rows, and copies of the weights that no cache holds together."""

    def __init__(self, each: Product, rows: int, copies: int | None = None) -> None:
        copies = copies or max(2, min(-(-2 * L2_BYTES // each.weight_bytes), MAX_WEIGHT_BYTES // each.weight_bytes))
        self.product = each
        shape = (copies, each.weight_rows, each.size)
        self.weights = list(torch.randn(shape, device="cuda", dtype=DTYPE) * each.size**-0.5)
        self.x = torch.randn(rows, each.size, device="cuda", dtype=DTYPE)
        self.norm = partial(rms_norm, self.x, torch.ones(each.size, device="cuda", dtype=DTYPE), EPS)

    def us(self, tuned: Config | None, replays: int) -> float:
        """Of the product behind the norm of its rows; None: of the library's."""
        launches = launches_of(self.product, self.x, self.weights, tuned)
        return time_launches([partial(behind_norm, launch, self.norm) for launch in launches], replays).median_us

    def timed(self, configs: Iterable[Config], replays: int) -> list[Timed]:
        """Fastest first. One that does not fit, or computes something else than the library, is told of and left out."""
        each, times = self.product, []
        expected = _library(each, self.x, self.weights[0])
        for tuned in configs:
            if not runs(each, self.x, self.weights[0], tuned):
                continue
            if torch.allclose(ours(each, self.x, self.weights[0], tuned), expected, rtol=TOLERANCE, atol=TOLERANCE):
                times.append(Timed(self.us(tuned, replays), tuned))
            else:
                print(f"WRONG: {each} {len(self.x)} rows {tuned}", flush=True)
        return sorted(times)
