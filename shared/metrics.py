"""What the services' metrics have in common: the registry, the buckets, and two collectors that the client library lacks.

Names are `lockstep_` and the unit; labels are bounded: what a client sends is never one. Every series is there, at 0, from the start.
"""

import importlib.metadata
import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import add

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Info, ProcessCollector, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

# Bounds of histograms, in seconds unless they say tokens. They hold every value that a service level objective names (TTFT of
# 0.2, 0.5, 1, 2, 3 s; inter-token latency of 10, 20, 50, 100 ms), so that "share below" is counted, never interpolated; a bound
# is only ever added. Beside that they are vLLM's, finer where a fast model would fall into the first bucket.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.8),
    *(1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_LATENCY_BUCKETS = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.05, 0.06, 0.08, 0.1),
    *(0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0),
)
TOKEN_DELAY_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
LOOP_LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)
COST_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)  # of a piece of work of one thread
REQUEST_TOKENS_BUCKETS = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6)
STEP_TOKENS_BUCKETS = (1.0, 8.0, *(float(2**power) for power in range(4, 15)))


def with_bound(buckets: tuple[float, ...], bound: float | None) -> tuple[float, ...]:
    """The bounds, and this one too: what a service level objective names is counted, never interpolated."""
    return buckets if bound is None else tuple(sorted({*buckets, bound}))


def new_registry(service: str) -> CollectorRegistry:
    """A registry with the process' own series (`process_*`) and the version of Lockstep."""
    disable_created_metrics()  # a second series beside each counter and histogram, which nobody asks for
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    build = Info("lockstep_build", "Version of Lockstep and name of the service.", registry=registry)
    build.info({"version": importlib.metadata.version("lockstep"), "service": service})
    return registry


class BatchHistogram(Collector):
    """A histogram that takes many values at a time, at the price of one, and one at a fifth of what the client library takes: for what
    is measured per token or per step."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._documentation, self._labels = name, documentation, labels
        self._bounds = tuple(buckets)
        self._les = [floatToGoString(bound) for bound in (*buckets, float("inf"))]
        self._of: dict[tuple[str, ...], BatchHistogram.Child] = {}
        registry.register(self)

    def labels(self, *values: str) -> "BatchHistogram.Child":
        """The series of these label values; they exist from now on."""
        return self._of.get(values) or self._of.setdefault(values, BatchHistogram.Child(self._bounds))

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, child in list(self._of.items()):
            counts, total = child.snapshot()
            family.add_metric(values, list(zip(self._les, counts, strict=True)), total)
        return [family]

    class Child:
        def __init__(self, bounds: tuple[float, ...]) -> None:
            self._bounds, self._bounds_array = bounds, np.array(bounds)
            self._counts = [0] * (len(bounds) + 1)  # a list: adding to one number of an array costs ten times as much
            self._sum = 0.0
            self._lock = threading.Lock()

        def observe(self, value: float, times: int = 1) -> None:
            """One value, counted so many times."""
            bucket = bisect_left(self._bounds, value)
            with self._lock:
                self._counts[bucket] += times
                self._sum += times * value

        def observe_all(self, values: NDArray[np.float64]) -> None:
            """values: `[N]`, N may be 0."""
            if not len(values):
                return
            first, last = bisect_left(self._bounds, values.min()), bisect_left(self._bounds, values.max())
            if first == last:  # as the gaps of streams that advance in step
                with self._lock:
                    self._counts[first] += len(values)
                    self._sum += float(values.sum())
                return
            counts = np.bincount(np.searchsorted(self._bounds_array, values), minlength=len(self._counts)).tolist()
            total = float(values.sum())
            with self._lock:
                self._counts = list(map(add, self._counts, counts))
                self._sum += total

        def snapshot(self) -> tuple[list[float], float]:
            """Counts as the exposition wants them, cumulative, and the sum."""
            with self._lock:
                return list(map(float, accumulate(self._counts))), self._sum


class Twins(Collector):
    """The same series under a second prefix, for dashboards and autoscalers that know another engine's names."""

    def __init__(
        self, prefix: str, twin_prefix: str, collectors: Iterable[Collector], names: frozenset[str], registry: CollectorRegistry
    ) -> None:
        """names: without prefix, of those of the collectors' families that get a twin."""
        self._prefix, self._twin_prefix, self._collectors, self._names = prefix, twin_prefix, list(collectors), names
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        for collector in self._collectors:
            for family in collector.collect():
                if family.name.removeprefix(self._prefix) in self._names:
                    yield self._renamed(family)

    def _renamed(self, family: Metric) -> Metric:
        twin = Metric(self._twin(family.name), family.documentation, family.type, family.unit)
        twin.samples = [Sample(self._twin(sample.name), *sample[1:]) for sample in family.samples]
        return twin

    def _twin(self, name: str) -> str:
        return self._twin_prefix + name.removeprefix(self._prefix)
