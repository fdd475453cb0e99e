"""The engine's series: what requests went through, group by group, under vLLM's names with our prefix and, on demand, with its own.

Labels: `model_name` from the settings; `engine`, the name of a worker group, or NO_ENGINE for requests that no group has.
Counters and histograms are told; gauges are read from the live state by each scrape, so that nothing can be left behind in one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shared.metrics import (
    COST_BUCKETS,
    LATENCY_BUCKETS,
    REQUEST_TOKENS_BUCKETS,
    STEP_BUCKETS,
    STEP_TOKENS_BUCKETS,
    TOKEN_LATENCY_BUCKETS,
    TTFT_BUCKETS,
    BatchHistogram,
    Twins,
    with_bound,
)
from shared.protocol.generation_pb2 import FinishReason, RejectReason
from shared.protocol.plan import MAX_BURST

NO_ENGINE = "none"
OTHER_ENGINE = "other"
MAX_ENGINES = 256  # groups with series of their own; a name is never forgotten, since its counters must not go back

FINISHED_REASONS = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
    FinishReason.FINISH_REASON_CANCELLED: "abort",
    FinishReason.FINISH_REASON_ERROR: "error",
    FinishReason.FINISH_REASON_UNAVAILABLE: "error",
    FinishReason.FINISH_REASON_DEADLINE: "error",
}
REJECTED_REASONS = {
    RejectReason.REJECT_REASON_INVALID: "invalid",
    RejectReason.REJECT_REASON_TOO_LONG: "too_long",
    RejectReason.REJECT_REASON_OVERLOADED: "overloaded",
    RejectReason.REJECT_REASON_DEADLINE: "deadline",
    RejectReason.REJECT_REASON_UNAVAILABLE: "unavailable",
}
TWINS = frozenset(
    (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
        *("request_time_per_output_token_seconds", "request_prompt_tokens", "request_generation_tokens"),
        *("request_max_num_generation_tokens", "request_params_max_tokens", "iteration_tokens_total"),
        *("prompt_tokens", "generation_tokens", "request_success", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits"),
    )
)


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

MoveCause = Literal["drained", "lost", "failed"]
MOVE_CAUSES: tuple[MoveCause, ...] = get_args(MoveCause)
CUTTING = ("gateway", "worker")
TOKEN_MODES = ("prefill_compute", "prefill_cache", "decode")
PLAN_ITERATIONS_BUCKETS = tuple(float(iterations) for iterations in range(1, MAX_BURST + 1))
PAGE_STATES = ("ready", "owned", "pending", "cached", "cooling")
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


@dataclass(frozen=True)
class RequestTimes:
    """When a request got where, in seconds on the scheduler's clock; None: it did not."""

    arrived_at: float
    admitted_at: float | None
    first_token_at: float | None
    ended_at: float

    @property
    def queue_s(self) -> float:
        """Until it had a slot or, without one, ended."""
        return (self.ended_at if self.admitted_at is None else self.admitted_at) - self.arrived_at

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def total_s(self) -> float:
        return self.ended_at - self.arrived_at


class SchedulerMetrics:
    """Of all groups."""

    def __init__(
        self,
        model_name: str,
        vllm_names: bool,
        registry: CollectorRegistry,
        slo_ttft_s: float | None = None,
        slo_itl_s: float | None = None,
    ) -> None:
        self._model_name = model_name
        self._series = _Series(registry, with_bound(TTFT_BUCKETS, slo_ttft_s), with_bound(TOKEN_LATENCY_BUCKETS, slo_itl_s))
        self._gauges = _Gauges(model_name, registry)
        self._engines: dict[str, EngineMetrics] = {}
        rejected = Counter(
            "lockstep_scheduler_requests_rejected",
            "Requests that were not accepted, or given up before they could start.",
            ["model_name", "reason"],
            registry=registry,
        )
        self._rejected = {reason: rejected.labels(model_name, word) for reason, word in REJECTED_REASONS.items()}
        moved = Counter(
            "lockstep_scheduler_requests_moved",
            "Times that a request which had begun at a group had to go on at another.",
            ["model_name", "cause"],
            registry=registry,
        )
        self._moved = {cause: moved.labels(model_name, cause) for cause in MOVE_CAUSES}
        cut_off = Counter(
            "lockstep_scheduler_requests_cut_off",
            "Requests that were not done when the time of a gateway or worker that stopped was over.",
            ["model_name", "component"],
            registry=registry,
        )
        self._cut_off = {component: cut_off.labels(model_name, component) for component in CUTTING}
        leads = Gauge("lockstep_scheduler_leads", "1 while this scheduler leads, 0 while it stands by.", ["model_name"], registry=registry)
        self._leads = leads.labels(model_name)
        self.no_engine = self.engine(NO_ENGINE)
        if vllm_names:
            Twins("lockstep_", "vllm:", (self._gauges, *self._series.collectors), TWINS, registry)

    def engine(self, name: str) -> "EngineMetrics":
        """The series of a group; those that it had when it was here before."""
        if name not in self._engines and len(self._engines) > MAX_ENGINES:
            name = OTHER_ENGINE
        if name not in self._engines:
            self._engines[name] = EngineMetrics(self._series, self._gauges, self._model_name, name)
        return self._engines[name]

    def states(self) -> dict[str, list[EngineState]]:
        """By engine: none of one that is lost, several where groups share a name."""
        return self._gauges.states()

    def token_counts(self) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """By engine: prompt tokens asked of the prefix cache, those found there, and completion tokens."""
        return _totals(self._series.queried), _totals(self._series.hits), _totals(self._series.generation)

    def watch_leadership(self, leads: Callable[[], bool]) -> None:
        """leads: asked at every scrape."""
        self._leads.set_function(leads)

    def rejected(self, reason: RejectReason) -> None:
        """A request was not accepted."""
        self._rejected[reason].inc()

    def moved(self, requests: int, cause: MoveCause) -> None:
        """So many have left a group that drains, have lost theirs, or have met one at which their rows, or all, have failed."""
        self._moved[cause].inc(requests)

    def cut_off(self, component: Literal["gateway", "worker"], requests: int) -> None:
        """One of these has stopped in good order, and this many were still in work."""
        self._cut_off[component].inc(requests)


class EngineMetrics:
    """Of one group, or of the requests that have none."""

    def __init__(self, series: "_Series", gauges: "_Gauges", model_name: str, name: str) -> None:
        labels = (model_name, name)
        self._name, self._gauges = name, gauges
        self._ttft = series.ttft.labels(*labels)
        self._itl = series.itl.labels(*labels)
        self._per_token = series.per_token.labels(*labels)
        self._e2e = series.e2e.labels(*labels)
        self._queue = series.queue.labels(*labels)
        self._prefill = series.prefill.labels(*labels)
        self._decode = series.decode.labels(*labels)
        self._inference = series.inference.labels(*labels)
        self._request_prompt = series.request_prompt.labels(*labels)
        self._request_generation = series.request_generation.labels(*labels)
        self._longest_generation = series.longest_generation.labels(*labels)
        self._max_tokens = series.max_tokens.labels(*labels)
        self._prompt = series.prompt.labels(*labels)
        self._generation = series.generation.labels(*labels)
        self._preemptions = series.preemptions.labels(*labels)
        self._queried = series.queried.labels(*labels)
        self._hits = series.hits.labels(*labels)
        self._computed, self._cached, self._decoded = (series.tokens.labels(*labels, mode) for mode in TOKEN_MODES)
        self._success = {reason: series.success.labels(*labels, word) for reason, word in FINISHED_REASONS.items()}
        self._step_tokens = series.step_tokens.labels(*labels)
        self._step = series.step.labels(*labels)
        self._iterations = series.iterations.labels(*labels)
        self._lost = {overdue: series.lost.labels(*labels, "overdue" if overdue else "broken") for overdue in (True, False)}
        self._ejected = series.ejected.labels(*labels)
        self._cost = series.cost.labels(*labels)
        gauges.read[name] = []

    def watch(self, read: ReadState) -> None:
        """The group is here. `read` is called by scrapes, in threads of theirs: it changes nothing and waits for nothing."""
        self._gauges.read.setdefault(self._name, []).append(read)

    def unwatch(self, read: ReadState, *, planned: bool = False) -> None:
        """The group is lost: its gauges are at rest, its counters stay. planned: it has drained, and its gauges are gone."""
        self._gauges.read[self._name].remove(read)
        if planned and not self._gauges.read[self._name]:
            del self._gauges.read[self._name]

    def admitted(self, cached_tokens: int, prompt_tokens: int | None) -> None:
        """A request has a slot, and need not compute so many of its tokens. prompt_tokens: None when it had a slot before."""
        if cached_tokens:
            self._cached.inc(cached_tokens)
        if prompt_tokens is not None:
            self._queried.inc(prompt_tokens)
            self._hits.inc(min(cached_tokens, prompt_tokens))

    def planned(self, seconds: float) -> None:
        """A result was taken and what follows was planned, in so much time of the thread."""
        self._cost.observe(seconds)

    def plan(self, decode_rows: int, prefill_tokens: int, iterations: int) -> None:
        """A plan has been computed."""
        self._iterations.observe(iterations)
        self._decoded.inc(decode_rows * iterations)
        if prefill_tokens:
            self._computed.inc(prefill_tokens)

    def steps(self, number: int, tokens: int, seconds: float) -> None:
        """So many iterations, each of so many decode rows and prefill tokens, timed by the worker."""
        self._step_tokens.observe(tokens, number)
        self._step.observe(seconds, number)

    def tokens(self, number: int, gaps_s: NDArray[np.float64]) -> None:
        """So many tokens of a plan; the times since the tokens before them in their requests, of those that are not the first."""
        self._generation.inc(number)
        self._itl.observe_all(gaps_s)

    def first_token(self, prompt_tokens: int, queue_s: float, prefill_s: float) -> None:
        """Of a request that was not resumed."""
        self._prompt.inc(prompt_tokens)
        self._ttft.observe(queue_s + prefill_s)
        self._queue.observe(queue_s)
        self._prefill.observe(prefill_s)

    def lost(self, *, overdue: bool) -> None:
        """The group's stream broke or, since it answered nothing, was given up."""
        self._lost[overdue].inc()

    def ejected(self) -> None:
        """The group is of no use, and others get its requests."""
        self._ejected.inc()

    def preempted(self) -> None:
        """A running request has lost its slot and will go on later."""
        self._preemptions.inc()

    def ended(self, reason: FinishReason, prompt_tokens: int, completion_tokens: int, max_tokens: int, times: RequestTimes) -> None:
        """A request that had been accepted has come to its end; once for each."""
        self._success[reason].inc()
        self._e2e.observe(times.total_s)
        self._request_prompt.observe(prompt_tokens)
        self._request_generation.observe(completion_tokens)
        self._longest_generation.observe(completion_tokens)
        self._max_tokens.observe(max_tokens)
        if times.first_token_at is not None and times.admitted_at is not None:
            decode_s = times.ended_at - times.first_token_at
            self._decode.observe(decode_s)
            self._inference.observe(times.ended_at - times.admitted_at)
            if completion_tokens > 1:
                self._per_token.observe(decode_s / (completion_tokens - 1))


class _Series:
    """What counts and measures; the labels of all are model_name and engine."""

    def __init__(self, registry: CollectorRegistry, ttft_buckets: tuple[float, ...], itl_buckets: tuple[float, ...]) -> None:
        labels = ["model_name", "engine"]

        def histogram(name: str, documentation: str, buckets: tuple[float, ...]) -> BatchHistogram:
            return BatchHistogram(f"lockstep_{name}", documentation, labels, buckets, registry)

        def counter(name: str, documentation: str, *more: str) -> Counter:
            return Counter(f"lockstep_{name}", documentation, [*labels, *more], registry=registry)

        self.ttft = histogram("time_to_first_token_seconds", "From the arrival of a request to its first token.", ttft_buckets)
        self.itl = histogram("inter_token_latency_seconds", "Time between tokens of a request.", itl_buckets)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time between a request's tokens after the first.", TOKEN_LATENCY_BUCKETS
        )
        self.e2e = histogram("e2e_request_latency_seconds", "From the arrival of a request to its end.", LATENCY_BUCKETS)
        self.queue = histogram("request_queue_time_seconds", "From the arrival of a request to its slot.", LATENCY_BUCKETS)
        self.prefill = histogram("request_prefill_time_seconds", "From a request's slot to its first token.", LATENCY_BUCKETS)
        self.decode = histogram("request_decode_time_seconds", "From a request's first token to its end.", LATENCY_BUCKETS)
        self.inference = histogram("request_inference_time_seconds", "From a request's slot to its end.", LATENCY_BUCKETS)
        self.request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", REQUEST_TOKENS_BUCKETS)
        self.request_generation = histogram("request_generation_tokens", "Completion tokens of a request.", REQUEST_TOKENS_BUCKETS)
        self.longest_generation = histogram(
            "request_max_num_generation_tokens",
            "Completion tokens of the longest choice of a request; here each choice is a request.",
            REQUEST_TOKENS_BUCKETS,
        )
        self.max_tokens = histogram("request_params_max_tokens", "Completion tokens that a request allows.", REQUEST_TOKENS_BUCKETS)
        self.prompt = counter("prompt_tokens", "Prompt tokens of requests that have begun to answer.")
        self.generation = counter("generation_tokens", "Completion tokens that were computed.")
        self.preemptions = counter("num_preemptions", "Requests that lost their slot to others.")
        self.queried = counter("prefix_cache_queries", "Prompt tokens of requests that have got a slot.")
        self.hits = counter("prefix_cache_hits", "Prompt tokens of these that came from the prefix cache.")
        self.tokens = counter(
            "realtime_tokens",
            "Tokens by what became of them: computed in prefill, taken from the prefix cache instead, or rows of decode steps.",
            "mode",
        )
        self.success = counter("request_success", "Requests that have ended, by reason.", "finished_reason")
        self.lost = counter("scheduler_group_losses", "Streams to a group that broke, or were given up since nothing came.", "cause")
        self.ejected = counter("scheduler_group_ejections", "Times that a group was ejected: others got its requests.")
        self.step_tokens = histogram("iteration_tokens_total", "Tokens of a step, decodes and prefill together.", STEP_TOKENS_BUCKETS)
        self.step = histogram("scheduler_step_seconds", "Time of a step, as the worker measured it.", STEP_BUCKETS)
        self.iterations = histogram("scheduler_plan_iterations", "Iterations of a plan: a burst has several.", PLAN_ITERATIONS_BUCKETS)
        self.cost = histogram(
            "scheduler_planning_seconds", "Time of the scheduler's thread for a result and the plans that follow from it.", COST_BUCKETS
        )

    @property
    def collectors(self) -> tuple[Collector, ...]:
        requests = (self.e2e, self.queue, self.prefill, self.decode, self.inference, self.per_token, self.success, self.preemptions)
        sizes = (self.request_prompt, self.request_generation, self.longest_generation, self.max_tokens, self.step_tokens)
        return (self.ttft, self.itl, self.prompt, self.generation, self.queried, self.hits, *requests, *sizes)


class _Gauges(Collector):
    """Asks the groups. The scrape's thread reads while the event loop goes on: each number is right, all together nearly so."""

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name
        self.read: dict[str, list[ReadState]] = {}  # by engine: none once it is lost, several where groups share a name
        registry.register(self)

    def states(self) -> dict[str, list[EngineState]]:
        """By engine."""
        return {name: [read() for read in list(reads)] for name, reads in list(self.read.items())}

    def collect(self) -> Iterable[Metric]:
        labels = ["model_name", "engine"]
        states = {(self._model_name, name): groups for name, groups in self.states().items()}
        for gauge, documentation, value in GAUGES:
            family = GaugeMetricFamily(f"lockstep_{gauge}", documentation, labels=labels)
            for engine, groups in states.items():
                family.add_metric(engine, sum(value(state) for state in groups))
            yield family
        usage = GaugeMetricFamily("lockstep_kv_cache_usage_perc", "Share of the KV cache that is in use, 0 to 1.", labels=labels)
        pages = GaugeMetricFamily("lockstep_scheduler_pages", "Pages of the KV cache, by state.", labels=[*labels, "state"])
        config = GaugeMetricFamily(
            "lockstep_cache_config_info", "1; the labels say how large the KV cache is.", labels=[*labels, "block_size", "num_gpu_blocks"]
        )
        for engine, groups in states.items():
            num_pages = sum(state.num_pages for state in groups)
            usage.add_metric(engine, sum(state.kv_usage * state.num_pages for state in groups) / max(num_pages, 1))
            for word in PAGE_STATES:
                pages.add_metric([*engine, word], sum(state.pages.get(word, 0) for state in groups))
            for page_size, number in sorted({(state.page_size, state.num_pages) for state in groups if state.num_pages}):
                config.add_metric([*engine, str(page_size), str(number)], 1)
        yield from (usage, pages, config)


def _totals(counter: Counter) -> dict[str, int]:
    """By engine."""
    samples = (sample for family in counter.collect() for sample in family.samples if sample.name.endswith("_total"))
    return {sample.labels["engine"]: int(sample.value) for sample in samples}
