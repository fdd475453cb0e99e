"""Gauges of groups: each scrape reads them from the live state, so that nothing can be left behind in one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.scheduler.series import LABELS

PAGE_STATES = ("ready", "owned", "pending", "cached", "cooling")


@dataclass(frozen=True)
class EngineState:
    """What gauges show of a group; of one that is not there, nothing."""

    ready: bool = False
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0  # 0 to 1
    pages: dict[str, int] = field(default_factory=dict)  # by state
    page_size: int = 0
    num_pages: int = 0  # the scratch page not included
    outstanding_plans: int = 0
    lead_s: float = 0.0
    lead_target_s: float = 0.0
    prefill_tokens_per_s: float = 0.0  # of the time in which it computes prompts


ReadState = Callable[[], EngineState]

GAUGES: tuple[tuple[str, str, Callable[[EngineState], float]], ...] = (
    ("num_requests_running", "Requests that have a slot.", lambda state: state.running),
    ("num_requests_waiting", "Requests that wait for a slot.", lambda state: state.waiting),
    ("num_tokens_waiting", "Tokens that waiting requests have to prefill.", lambda state: state.waiting_tokens),
    (
        "scheduler_group_ready",
        "1 while the group takes requests: it is there, does not drain and is not ejected.",
        lambda state: state.ready,
    ),
    ("scheduler_outstanding_plans", "Plans whose results are not in.", lambda state: state.outstanding_plans),
    ("scheduler_lead_seconds", "Time of the work that is queued at the group behind the plan that runs.", lambda state: state.lead_s),
    ("scheduler_lead_target_seconds", "Time of work that should be queued there.", lambda state: state.lead_target_s),
    (
        "scheduler_prefill_tokens_per_second",
        "Prompt tokens a second that steps with prefill compute while they run: what the group can take.",
        lambda state: state.prefill_tokens_per_s,
    ),
)


class Gauges(Collector):
    """Asks the groups. The scrape's thread reads while the event loop goes on: each number is right, all together nearly so."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name
        self.read: dict[str, list[ReadState]] = {}  # by engine: none once it is lost, several where groups share a name
        registry.register(self)

    def states(self) -> dict[str, list[EngineState]]:
        """By engine."""
        return {name: [read() for read in list(reads)] for name, reads in list(self.read.items())}

    def collect(self) -> Iterable[Metric]:
        states = {(self._model_name, name): groups for name, groups in self.states().items()}
        for gauge, documentation, value in GAUGES:
            family = GaugeMetricFamily(f"lockstep_{gauge}", documentation, labels=LABELS)
            for engine, groups in states.items():
                family.add_metric(engine, sum(value(state) for state in groups))
            yield family
        usage = GaugeMetricFamily("lockstep_kv_cache_usage_perc", "Share of the KV cache that is in use, 0 to 1.", labels=LABELS)
        pages = GaugeMetricFamily("lockstep_scheduler_pages", "Pages of the KV cache, by state.", labels=[*LABELS, "state"])
        config = GaugeMetricFamily(
            "lockstep_cache_config_info", "1; the labels say how large the KV cache is.", labels=[*LABELS, "block_size", "num_gpu_blocks"]
        )
        for engine, groups in states.items():
            num_pages = sum(state.num_pages for state in groups)
            usage.add_metric(engine, sum(state.kv_usage * state.num_pages for state in groups) / max(num_pages, 1))
            for word in PAGE_STATES:
                pages.add_metric([*engine, word], sum(state.pages.get(word, 0) for state in groups))
            for page_size, number in sorted({(state.page_size, state.num_pages) for state in groups if state.num_pages}):
                config.add_metric([*engine, str(page_size), str(number)], 1)
        yield from (usage, pages, config)
