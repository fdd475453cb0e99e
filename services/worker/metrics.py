"""What the supervisor tells of its group's device: steps, idle time, memory, start-up. The requests are the scheduler's to count."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.worker.distributed.sums import Sums
from services.worker.engine.interface import Memory
from services.worker.startup import PhaseTimes
from shared.metrics import COST_BUCKETS, STEP_BUCKETS

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
KINDS = ("decode", "prefill")  # of iterations

RankPids = Callable[[], Mapping[int, int]]  # by rank


class WorkerMetrics:
    """Of all groups of this process; the label `engine` is a group's name, as in the scheduler's series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["engine"]
        self.step = Histogram(
            "lockstep_worker_step_seconds",
            "Time of one iteration, by whether it had prefill rows.",
            ["engine", "kind"],
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.launch = Histogram(
            "lockstep_worker_launch_seconds",
            "Time in which the host launched an iteration, by whether it had prefill rows.",
            ["engine", "kind"],
            buckets=COST_BUCKETS,
            registry=registry,
        )
        self.busy = Counter("lockstep_worker_busy_seconds", "Time in which the group computed.", labels, registry=registry)
        self.idle = Counter(
            "lockstep_worker_idle_seconds", "Time between iterations in which the group had nothing to compute.", labels, registry=registry
        )
        self.plans = Counter("lockstep_worker_plans", "Plans that were executed in full.", labels, registry=registry)
        self.refused = Counter(
            "lockstep_worker_plans_refused", "Plans that were not executed since they could have done harm.", labels, registry=registry
        )
        self.gathered = Counter(
            "lockstep_worker_rows_gathered",
            "Rows whose logits were gathered whole, since no candidates can stand for them.",
            labels,
            registry=registry,
        )
        self.replayed = Counter(
            "lockstep_worker_graph_iterations", "Iterations that were replayed as CUDA graphs.", labels, registry=registry
        )
        self.streams = Counter("lockstep_worker_streams", "Execute streams that took the group over.", labels, registry=registry)
        self.ready = Gauge("lockstep_worker_ready", "1 while the group can compute.", labels, registry=registry)
        self.queued = Gauge("lockstep_worker_queued_plans", "Plans that have come and are not launched in full.", labels, registry=registry)
        self.device_memory = Gauge(
            "lockstep_worker_device_memory_bytes", "Device memory of a rank, by use.", ["engine", "rank", "use"], registry=registry
        )
        sum_labels = ["engine", "transport", "bytes"]
        self.sum_seconds = Gauge(
            "lockstep_worker_all_reduce_seconds", "Time of an all-reduce, as measured at the start.", sum_labels, registry=registry
        )
        self.sum_bandwidth = Gauge(
            "lockstep_worker_all_reduce_bus_bytes_per_second",
            "What every rank sent at least in an all-reduce, by its time, as measured at the start.",
            sum_labels,
            registry=registry,
        )
        self.fallbacks = Counter(
            "lockstep_worker_peer_memory_fallbacks", "Starts whose GPUs should have shared memory and could not.", labels, registry=registry
        )
        self.borrowed = Gauge(
            "lockstep_worker_borrowed_shapes",
            "Shapes whose tiles were found with another version of Triton than the one that runs.",
            labels,
            registry=registry,
        )
        self.startup = _StartupTimes()
        self.rank_memory = _RankMemory()
        registry.register(self.startup)
        registry.register(self.rank_memory)

    def group(self, engine: str, ranks: int) -> "GroupMetrics":
        """The series of a group; those that it had before, when it starts anew."""
        return GroupMetrics(self, engine, ranks)

    def node(self, engine: str, rank_pids: RankPids) -> Callable[[str, float], None]:
        """The series of a group's node beside the leader's, who counts the rest -> what hears how far its start-up has come."""
        self.rank_memory.pids[engine] = rank_pids
        self.startup.groups[engine] = startup = PhaseTimes()
        return startup.advance


class GroupMetrics:
    """Of one group."""

    def __init__(self, all_groups: WorkerMetrics, engine: str, ranks: int) -> None:
        self._all, self._engine = all_groups, engine
        self._steps = {kind: all_groups.step.labels(engine, kind) for kind in KINDS}
        self._launches = {kind: all_groups.launch.labels(engine, kind) for kind in KINDS}
        self._busy, self._idle = all_groups.busy.labels(engine), all_groups.idle.labels(engine)
        self._plans, self._refused = all_groups.plans.labels(engine), all_groups.refused.labels(engine)
        self._gathered, self._gathered_rows = all_groups.gathered.labels(engine), 0
        self._replayed, self._replayed_iterations = all_groups.replayed.labels(engine), 0
        self._streams = all_groups.streams.labels(engine)
        self._fallbacks = all_groups.fallbacks.labels(engine)
        self._borrowed = all_groups.borrowed.labels(engine)
        self._memory = [
            {use: all_groups.device_memory.labels(engine, str(rank), use) for use in ("weights", "kv_cache")} for rank in range(ranks)
        ]
        self._startup = all_groups.startup.groups[engine] = PhaseTimes()

    def watch(self, ready: Callable[[], bool], queued_plans: Callable[[], int], rank_pids: RankPids) -> None:
        """What is read anew by each scrape, in a thread of its own."""
        self._all.ready.labels(self._engine).set_function(ready)
        self._all.queued.labels(self._engine).set_function(queued_plans)
        self._all.rank_memory.pids[self._engine] = rank_pids

    def phase(self, phase: str, progress: float) -> None:
        """Start-up has come so far."""
        self._startup.advance(phase, progress)

    @property
    def startup_seconds(self) -> dict[str, float]:
        """By phase, in their order."""
        return self._startup.seconds()

    def memory(self, rank: int, memory: Memory) -> None:
        """What a rank holds once it is ready."""
        self._memory[rank]["weights"].set(memory.weights)
        self._memory[rank]["kv_cache"].set(memory.kv_cache)

    def sums(self, sums: Sums) -> None:
        """What the first sums of a start have told."""
        self._fallbacks.inc(sums.fell_back)
        for each in sums.times:
            labels = self._engine, each.transport, str(each.size)
            self._all.sum_seconds.labels(*labels).set(each.seconds)
            self._all.sum_bandwidth.labels(*labels).set(each.bus_bandwidth)

    def shapes_borrowed(self, shapes: int) -> None:
        """So many of the model's have tiles of another Triton."""
        self._borrowed.set(shapes)

    def iteration(self, busy_us: int, idle_us: int, launch_us: int, prefill: bool) -> None:
        """One is finished; `idle_us` passed before it, and its launch took `launch_us`."""
        kind = KINDS[prefill]
        self._steps[kind].observe(busy_us / 1e6)
        self._launches[kind].observe(launch_us / 1e6)
        self._busy.inc(busy_us / 1e6)
        self._idle.inc(idle_us / 1e6)

    def plan_done(self) -> None:
        self._plans.inc()

    def plan_refused(self) -> None:
        self._refused.inc()

    def rows_gathered(self, rows: int) -> None:
        """So many since the group started."""
        self._gathered.inc(rows - self._gathered_rows)
        self._gathered_rows = rows

    def iterations_replayed(self, iterations: int) -> None:
        """So many since the group started."""
        self._replayed.inc(iterations - self._replayed_iterations)
        self._replayed_iterations = iterations

    def stream_taken(self) -> None:
        self._streams.inc()


class _StartupTimes(Collector):
    def __init__(self) -> None:
        self.groups: dict[str, PhaseTimes] = {}  # by engine

    def collect(self) -> Iterable[Metric]:
        durations = GaugeMetricFamily(
            "lockstep_worker_startup_seconds", "Time that a phase of start-up took, or has taken so far.", labels=["engine", "phase"]
        )
        progress = GaugeMetricFamily(
            "lockstep_worker_startup_progress_ratio", "Share of the current phase that is done.", labels=["engine"]
        )
        for engine, startup in list(self.groups.items()):
            for phase, seconds in startup.seconds().items():
                durations.add_metric([engine, phase], seconds)
            progress.add_metric([engine], startup.progress)
        return durations, progress


class _RankMemory(Collector):
    """Main memory of the ranks' processes; the supervisor's own is `process_resident_memory_bytes`."""

    def __init__(self) -> None:
        self.pids: dict[str, RankPids] = {}  # by engine

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "lockstep_worker_rank_resident_memory_bytes", "Main memory of a rank's process.", labels=["engine", "rank"]
        )
        for engine, pids in list(self.pids.items()):
            for rank, pid in pids().items():
                family.add_metric([engine, str(rank)], _resident_bytes(pid))
        return [family]


def _resident_bytes(pid: int) -> int:
    """0 once the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    except (FileNotFoundError, ProcessLookupError):
        return 0
