"""Counters and histograms of groups: their names, meanings and buckets."""

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.registry import Collector

from shared.metrics import (
    COST_BUCKETS,
    LATENCY_BUCKETS,
    REQUEST_TOKENS_BUCKETS,
    STEP_BUCKETS,
    STEP_TOKENS_BUCKETS,
    TOKEN_LATENCY_BUCKETS,
    BatchHistogram,
)
from shared.protocol.plan import MAX_BURST

LABELS = ("model_name", "engine")  # of every series of a group
PLAN_ITERATIONS_BUCKETS = tuple(float(iterations) for iterations in range(1, MAX_BURST + 1))


class Series:
    """The labels of all are LABELS, and of some one more."""

    def __init__(self, registry: CollectorRegistry, ttft_buckets: tuple[float, ...], itl_buckets: tuple[float, ...]) -> None:
        self.by_name: dict[str, Collector] = {}  # without prefix

        def histogram(name: str, documentation: str, buckets: tuple[float, ...]) -> BatchHistogram:
            self.by_name[name] = made = BatchHistogram(f"lockstep_{name}", documentation, LABELS, buckets, registry)
            return made

        def counter(name: str, documentation: str, *more: str) -> Counter:
            self.by_name[name] = made = Counter(f"lockstep_{name}", documentation, [*LABELS, *more], registry=registry)
            return made

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
