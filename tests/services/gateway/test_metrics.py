"""The gateway's series: each request once, by outcome, at rest afterwards, and no label that a client chose."""

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry

from services.gateway.metrics import CODES, GatewayMetrics
from shared.metrics import new_registry

CHAT = "/v1/chat/completions"


class Metrics(GatewayMetrics):
    def __init__(self) -> None:
        self.registry = new_registry("gateway")
        super().__init__("tiny", "127.0.0.1:7100", self.registry)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"lockstep_gateway_{name}", labels)


def series(registry: CollectorRegistry) -> int:
    return prometheus_client.generate_latest(registry).count(b"\n")


def test_every_series_of_answers_is_there_at_0_from_the_start() -> None:
    metrics = Metrics()
    for code in CODES:
        for model_name in ("tiny", "unknown"):
            labels = {"model_name": model_name, "endpoint": CHAT, "code": str(code), "stream": "true"}
            assert metrics.value("requests_total", **labels) == 0
    assert metrics.value("time_to_first_token_seconds_count", model_name="tiny", endpoint=CHAT) == 0
    assert metrics.value("tokens_total", model_name="tiny", type="completion") == 0
    assert metrics.value("rejections_total", reason="overloaded") == metrics.value("disconnects_total") == 0
    assert metrics.value("backend_up", backend="127.0.0.1:7100") == 0


def test_a_stream_is_counted_once_with_its_tokens_and_gaps() -> None:
    metrics = Metrics()
    request = metrics.request(CHAT)
    assert metrics.value("inflight_requests", endpoint=CHAT) == 1
    request.accepted(stream=True)
    request.tokens(choice=0, count=1)
    request.tokens(choice=0, count=3)
    request.used(prompt_tokens=9, cached_tokens=8, completion_tokens=4)
    request.ended(200)
    assert metrics.value("inflight_requests", endpoint=CHAT) == 0
    assert metrics.value("requests_total", model_name="tiny", endpoint=CHAT, code="200", stream="true") == 1
    assert metrics.value("time_to_first_token_seconds_count", model_name="tiny", endpoint=CHAT) == 1
    assert metrics.value("inter_token_latency_seconds_count", model_name="tiny", endpoint=CHAT) == 3
    assert metrics.value("request_duration_seconds_count", model_name="tiny", endpoint=CHAT) == 1
    assert [metrics.value("tokens_total", model_name="tiny", type=kind) for kind in ("prompt", "cached", "completion")] == [9, 8, 4]


def test_choices_side_by_side_have_gaps_of_their_own_and_one_first_token() -> None:
    metrics = Metrics()
    request = metrics.request(CHAT)
    request.accepted(stream=False)
    for choice in (0, 1, 0, 1):
        request.tokens(choice, 1)
    assert metrics.value("time_to_first_token_seconds_count", model_name="tiny", endpoint=CHAT) == 1
    assert metrics.value("inter_token_latency_seconds_count", model_name="tiny", endpoint=CHAT) == 2


@pytest.mark.parametrize(
    "code, name, labels",
    [
        (429, "rejections_total", {"reason": "overloaded"}),
        (503, "rejections_total", {"reason": "unavailable"}),
        (504, "rejections_total", {"reason": "timeout"}),
        (499, "disconnects_total", {}),
    ],
)
def test_what_was_not_served_is_counted_by_why(code: int, name: str, labels: dict[str, str]) -> None:
    metrics = Metrics()
    metrics.request(CHAT).ended(code)
    assert metrics.value(name, **labels) == 1
    assert metrics.value("requests_total", model_name="unknown", endpoint=CHAT, code=str(code), stream="false") == 1


def test_met_05_paths_of_clients_make_one_endpoint() -> None:
    metrics = Metrics()
    before = series(metrics.registry)
    for number in range(500):
        metrics.request(f"/{number}").ended(404)
    assert series(metrics.registry) - before < 50  # one histogram and one counter
    assert metrics.value("requests_total", model_name="unknown", endpoint="other", code="404", stream="false") == 500
