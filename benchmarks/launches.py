"""How launches are timed on a GPU: captured in a CUDA graph and replayed, so that the host does not count."""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

REPLAYS = 50
LAUNCHES = 20  # of one graph, at least
L2_BYTES = 2**26  # more than any cache of the GPUs we know: rotating inputs together exceed it
DTYPE = torch.bfloat16

Launch = Callable[[], object]


class Time(NamedTuple):
    median_us: float
    p95_us: float


class Case(NamedTuple):
    """One line of the table. Of `work`, bytes count against read bandwidth, operations against the matrix rate."""

    shape: str
    work: float
    unit: str  # "TB/s" or "TFLOP/s"
    launches: list[Launch]
    torch_launches: list[Launch] | None = None


def time_launches(launches: Sequence[Launch], replays: int = REPLAYS) -> Time:
    """Microseconds of one launch; the list is repeated in one graph until it holds LAUNCHES."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still be making what the launches read
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()  # compiles, and fills the allocator
    torch.cuda.synchronize()
    repeats = -(-LAUNCHES // len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for launch in launches:
                launch()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (repeats * len(launches)))
    return Time(statistics.median(times), statistics.quantiles(times, n=20)[-1])


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)
