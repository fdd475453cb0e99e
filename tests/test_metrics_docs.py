"""docs/metrics.md lists every series that a service exports, with its type and labels, and no other."""

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from services.gateway.metrics import GatewayMetrics
from services.scheduler.gauges import EngineState
from services.scheduler.metrics import TWINS, SchedulerMetrics
from services.worker.distributed.sums import Sums, SumTime
from services.worker.engine.interface import Memory
from services.worker.metrics import WorkerMetrics
from shared.admin import Heartbeat
from shared.metrics import new_registry

PAGE = Path(__file__).resolve().parents[1] / "docs/metrics.md"
ROW = re.compile(r"\| `(lockstep_\w+)` \| (\w+) \| ([^|]*) \| ([^|]+) \| ([^|]+) \|")
UNITS = {"seconds": "s", "bytes": "bytes", "ratio": "0 to 1", "perc": "0 to 1"}


class Series(NamedTuple):
    name: str
    kind: str
    labels: frozenset[str]


def worker() -> CollectorRegistry:
    registry = new_registry("worker")
    metrics = WorkerMetrics(registry).group("group-0", 1)
    metrics.watch(lambda: True, lambda: 0, lambda: {0: os.getpid()})
    metrics.phase("loading weights", 0.5)
    metrics.memory(0, Memory(1, 1))
    metrics.sums(Sums((SumTime("nccl", 2, 4096, 1e-5),)))
    return registry


def scheduler() -> CollectorRegistry:
    registry = new_registry("scheduler")
    SchedulerMetrics("tiny", True, registry).engine("group-0").watch(lambda: EngineState(page_size=16, num_pages=10))
    return registry


def gateway() -> CollectorRegistry:
    registry = new_registry("gateway")
    GatewayMetrics("tiny", "scheduler:7100", registry)
    return registry


REGISTRIES = {"Gateway": gateway, "Scheduler": scheduler, "Worker": worker}


def exported(registry: CollectorRegistry) -> set[Series]:
    Heartbeat(registry)  # the admin port adds it
    found = set()
    for family in registry.collect():
        if not family.name.startswith("lockstep_") or family.name == "lockstep_build":
            continue
        labels = frozenset(label for sample in family.samples for label in sample.labels) - {"le"}
        found.add(Series(family.name + ("_total" if family.type == "counter" else ""), family.type, labels))
    return found


def documented(service: str) -> dict[Series, str]:
    """Series to unit, of the section of a service."""
    section = PAGE.read_text().split(f"\n## {service}\n")[1].split("\n## ")[0]
    rows = [ROW.fullmatch(line) for line in section.splitlines() if line.startswith("| `")]
    assert all(rows), "a row is not as the others are"
    return {Series(row[1], row[2], frozenset(re.findall(r"`(\w+)`", row[3]))): row[4] for row in rows if row}


@pytest.mark.parametrize("service", REGISTRIES)
def test_the_page_lists_what_is_exported(service: str) -> None:
    page = documented(service)
    assert page.keys() == exported(REGISTRIES[service]())
    for series, unit in page.items():
        wanted = UNITS.get(series.name.removesuffix("_total").rsplit("_", 1)[-1])
        assert wanted in (None, unit), series.name


def test_the_page_names_the_twins() -> None:
    counters = {
        *("prompt_tokens", "generation_tokens", "request_success", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits"),
    }
    assert set(re.findall(r"`vllm:(\w+)`", PAGE.read_text())) == {name + "_total" * (name in counters) for name in TWINS}
