"""The engine's series: what requests went through, group by group, under vLLM's names with our prefix and, on demand, with its own.

Labels: `model_name` from the settings; `engine`, the name of a worker group, or NO_ENGINE for requests that no group has.
Counters and histograms (`series`) are told what happens here; gauges (`gauges`) ask for what is.
"""

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge

from services.scheduler.gauges import EngineState, Gauges, ReadState
from services.scheduler.requests import RequestTimes
from services.scheduler.series import Series
from shared.metrics import TOKEN_LATENCY_BUCKETS, TTFT_BUCKETS, Twins, with_bound
from shared.protocol.generation_pb2 import FinishReason, RejectReason

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
TOKEN_MODES = ("prefill_compute", "prefill_cache", "decode")

MoveCause = Literal["drained", "lost", "failed"]
Stopping = Literal["gateway", "worker"]  # what may stop with requests in work


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
        self._series = Series(registry, with_bound(TTFT_BUCKETS, slo_ttft_s), with_bound(TOKEN_LATENCY_BUCKETS, slo_itl_s))
        self._gauges = Gauges(model_name, registry)
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
        self._moved = {cause: moved.labels(model_name, cause) for cause in get_args(MoveCause)}
        cut_off = Counter(
            "lockstep_scheduler_requests_cut_off",
            "Requests that were not done when the time of a gateway or worker that stopped was over.",
            ["model_name", "component"],
            registry=registry,
        )
        self._cut_off = {component: cut_off.labels(model_name, component) for component in get_args(Stopping)}
        leads = Gauge("lockstep_scheduler_leads", "1 while this scheduler leads, 0 while it stands by.", ["model_name"], registry=registry)
        self._leads = leads.labels(model_name)
        self.no_engine = self.engine(NO_ENGINE)
        if vllm_names:
            series = (series for name, series in self._series.by_name.items() if name in TWINS)
            Twins("lockstep_", "vllm:", (self._gauges, *series), TWINS, registry)

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

    def cut_off(self, component: Stopping, requests: int) -> None:
        """One of these has stopped in good order, and this many were still in work."""
        self._cut_off[component].inc(requests)


class EngineMetrics:
    """Of one group, or of the requests that have none."""

    def __init__(self, series: Series, gauges: Gauges, model_name: str, name: str) -> None:
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


def _totals(counter: Counter) -> dict[str, int]:
    """By engine."""
    samples = (sample for family in counter.collect() for sample in family.samples if sample.name.endswith("_total"))
    return {sample.labels["engine"]: int(sample.value) for sample in samples}
