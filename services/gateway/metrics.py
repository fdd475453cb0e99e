"""What the gateway tells of HTTP requests: how they were answered, how long their clients waited, what they used.

Labels are bounded: `model_name` is the first served name, or UNKNOWN_MODEL for a request that named no model of ours; paths and
methods of no route of ours are one endpoint, `other`.
"""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shared.metrics import LATENCY_BUCKETS, TOKEN_DELAY_BUCKETS, TOKEN_LATENCY_BUCKETS, TTFT_BUCKETS, BatchHistogram, with_bound

UNKNOWN_MODEL = "unknown"
OTHER_ENDPOINT = "other"
GENERATION_ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
TOKEN_ENDPOINTS = ("/v1/chat/completions/render", "/tokenize", "/detokenize", "/tokenizer_info")
ENDPOINTS = frozenset((*GENERATION_ENDPOINTS, *TOKEN_ENDPOINTS, "/v1/models", "/health", "/version"))
CLIENT_CLOSED_REQUEST = 499  # nginx's status, for requests whose clients have gone: nobody gets it
CODES = (200, 400, 401, 404, 405, 413, 429, CLIENT_CLOSED_REQUEST, 500, 503, 504)  # of generation requests, there from the start
REJECTIONS = {429: "overloaded", 503: "unavailable", 504: "timeout"}
RESUBMISSIONS = ("lost", "moved", "broken")
TOKEN_TYPES = ("prompt", "cached", "completion")


class GatewayMetrics:
    """Of one gateway process."""

    def __init__(
        self,
        model_name: str,
        backend: str,
        registry: CollectorRegistry,
        slo_ttft_s: float | None = None,
        slo_itl_s: float | None = None,
    ) -> None:
        """model_name: the first name that is served, which stands for its aliases. backend: the scheduler's address."""
        self.model_name, self._backend = model_name, backend
        self._requests = Counter(
            "lockstep_gateway_requests",
            "HTTP requests that have ended.",
            ["model_name", "endpoint", "code", "stream"],
            registry=registry,
        )
        self._duration = Histogram(
            "lockstep_gateway_request_duration_seconds",
            "From the arrival of an HTTP request to the end of its answer.",
            ["model_name", "endpoint"],
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._inflight = Gauge("lockstep_gateway_inflight_requests", "HTTP requests in work.", ["endpoint"], registry=registry)
        self._ttft = Histogram(
            "lockstep_gateway_time_to_first_token_seconds",
            "From the arrival of an HTTP request to its first token.",
            ["model_name", "endpoint"],
            buckets=with_bound(TTFT_BUCKETS, slo_ttft_s),
            registry=registry,
        )
        self._itl = BatchHistogram(
            "lockstep_gateway_inter_token_latency_seconds",
            "Time between the tokens of an answer as they come to the gateway.",
            ["model_name", "endpoint"],
            with_bound(TOKEN_LATENCY_BUCKETS, slo_itl_s),
            registry,
        )
        self._delay = BatchHistogram(
            "lockstep_gateway_token_delay_seconds",
            "From the arrival of tokens at the gateway to the connection that takes their text.",
            ["model_name", "endpoint"],
            TOKEN_DELAY_BUCKETS,
            registry,
        )
        tokens = Counter(
            "lockstep_gateway_tokens", "Tokens as the usage of answers counts them.", ["model_name", "type"], registry=registry
        )
        self._tokens = {kind: tokens.labels(model_name, kind) for kind in TOKEN_TYPES}
        rejections = Counter(
            "lockstep_gateway_rejections", "HTTP requests that were not served for want of room.", ["reason"], registry=registry
        )
        self._rejections = {code: rejections.labels(reason) for code, reason in REJECTIONS.items()}
        resubmissions = Counter(
            "lockstep_gateway_resubmissions",
            "Attempts after the first, of requests that had to go on at another scheduler.",
            ["cause"],
            registry=registry,
        )
        self._resubmissions = {cause: resubmissions.labels(cause) for cause in RESUBMISSIONS}
        self._disconnects = Counter("lockstep_gateway_disconnects", "Clients that left before their answer ended.", registry=registry)
        self._backend_up = Gauge(
            "lockstep_gateway_backend_up", "1 while there is a session with the scheduler.", ["backend"], registry=registry
        ).labels(backend)
        for endpoint in (*sorted(ENDPOINTS), OTHER_ENDPOINT):
            self._inflight.labels(endpoint)
        for endpoint in GENERATION_ENDPOINTS:
            self._ttft.labels(model_name, endpoint)
            self._itl.labels(model_name, endpoint)
            self._delay.labels(model_name, endpoint)
            for name in (model_name, UNKNOWN_MODEL):
                self._duration.labels(name, endpoint)
                for code in CODES:
                    for stream in ("true", "false"):
                        self._requests.labels(name, endpoint, str(code), stream)

    def resubmitted(self, cause: str) -> None:
        """A request was submitted again, for one of RESUBMISSIONS."""
        self._resubmissions[cause].inc()

    def watch(self, backend_up: Callable[[], bool]) -> None:
        """`backend_up` is called by scrapes, in threads of theirs."""
        self._backend_up.set_function(backend_up)

    def request(self, path: str) -> "RequestMetrics":
        """One HTTP request has come."""
        return RequestMetrics(self, path if path in ENDPOINTS else OTHER_ENDPOINT)


class RequestMetrics:
    """Of one HTTP request, from its arrival to `ended`, which must come once."""

    def __init__(self, metrics: GatewayMetrics, endpoint: str) -> None:
        self.begun_at = time.monotonic()
        self._metrics, self._endpoint = metrics, endpoint
        self._model_name, self._stream = UNKNOWN_MODEL, False
        self._itl: BatchHistogram.Child | None = None  # once it has tokens
        self._delay: BatchHistogram.Child | None = None  # if it is a stream
        self._last_token_at: dict[int, float] = {}  # by choice
        self._inflight = metrics._inflight.labels(endpoint)
        self._inflight.inc()

    def accepted(self, stream: bool) -> None:
        """It is for a model of ours."""
        self._model_name, self._stream = self._metrics.model_name, stream
        if stream:
            self._delay = self._metrics._delay.labels(self._model_name, self._endpoint)

    def tokens(self, choice: int, count: int) -> None:
        """So many tokens have come for a choice, together."""
        now = time.monotonic()
        if self._itl is None:
            self._itl = self._metrics._itl.labels(self._model_name, self._endpoint)
            self._metrics._ttft.labels(self._model_name, self._endpoint).observe(now - self.begun_at)
        elif (last := self._last_token_at.get(choice)) is not None:
            self._itl.observe((now - last) / count, count)
        self._last_token_at[choice] = now

    def sent(self, delay_s: float) -> None:
        """Text of a stream has been handed to its connection, so long after the first of its tokens came."""
        if self._delay is not None:
            self._delay.observe(delay_s)

    def used(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """What its answer used."""
        for kind, count in zip(TOKEN_TYPES, (prompt_tokens, cached_tokens, completion_tokens), strict=True):
            self._metrics._tokens[kind].inc(count)

    def ended(self, code: int) -> None:
        """With this status; 0: before there was one."""
        metrics = self._metrics
        code = code or 500
        self._inflight.dec()
        metrics._requests.labels(self._model_name, self._endpoint, str(code), str(self._stream).lower()).inc()
        metrics._duration.labels(self._model_name, self._endpoint).observe(time.monotonic() - self.begun_at)
        if code in metrics._rejections:
            metrics._rejections[code].inc()
        if code == CLIENT_CLOSED_REQUEST:
            metrics._disconnects.inc()
