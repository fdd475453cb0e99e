"""What the device can do at best, measured where a benchmark runs: a figure means something as a share of it."""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
import triton
import triton.language as tl

SIZE = 8192  # of the square matrices, on a GPU
BURST = 2  # products: longer, and the card's power limit slows it down
SUSTAINED_S = 2.5


class Ceilings(NamedTuple):
    read: float  # bytes a second
    matrix: float  # operations a second of products in bursts of some milliseconds, bfloat16 on a GPU and float32 on a CPU
    sustained: float  # of products that go on for seconds

    def times(self, devices: int) -> "Ceilings":
        """Of so many devices."""
        return Ceilings(*(devices * each for each in self))

    def __str__(self) -> str:
        products = f"{self.matrix / 1e12:.4g} TFLOP/s in a burst, {self.sustained / 1e12:.4g} sustained"
        return f"reading {self.read / 1e12:.3g} TB/s; products {products}"


def measure_ceilings(device: str = "cuda", sustained_s: float = SUSTAINED_S) -> Ceilings:
    """Takes some seconds, and gives the device's memory back."""
    ceilings = _of_gpu(sustained_s) if device == "cuda" else _of_cpu()
    if device == "cuda":
        torch.cuda.empty_cache()
    return ceilings


@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(x_ptr, sums_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK, num_stages=4):
        total += tl.load(x_ptr + start + tl.arange(0, BLOCK))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total))


def _of_gpu(sustained_s: float) -> Ceilings:
    a, b = torch.randn(2, SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    operations = 2 * SIZE**3

    def products(count: int) -> float:
        """Operations a second."""

        def multiply() -> None:
            for _ in range(count):
                torch.matmul(a, b)

        return count * operations / _timed(multiply)

    burst = products(BURST)
    return Ceilings(_read_of_gpu(), burst, products(max(1, round(sustained_s * burst / operations))))


def _read_of_gpu() -> float:
    programs = 2 * torch.cuda.get_device_properties(0).multi_processor_count
    x, sums = torch.randn(2**30, device="cuda"), torch.empty(programs, device="cuda")
    return x.nbytes / median(_timed(lambda: _read_kernel[(programs,)](x, sums, x.numel(), 8192, num_warps=16)) for _ in range(10))


def _timed(launch: Callable[[], object]) -> float:
    """Seconds on the device, after a launch that does not count."""
    launch()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _of_cpu() -> Ceilings:
    """For a table to be made without a GPU: one thread, small, and no power limit to tell a burst from the rest."""
    x, (a, b) = torch.randn(2**24), torch.randn(2, 512, 512)

    def timed(work: Callable[[], object]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    read = x.nbytes / median(timed(x.sum) for _ in range(3))
    matrix = 2 * 512**3 / median(timed(lambda: a @ b) for _ in range(3))
    return Ceilings(read, matrix, matrix)
