"""One trace from the client's header over the gateway to the scheduler's phases, at a collector."""

from collections.abc import Callable
from pathlib import Path

from tests.e2e.stack import Stack
from tests.otlp import attributes, collecting
from tests.processes import eventually

TRACE, CLIENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_trace_goes_from_the_client_to_the_phases_of_its_request(start_stack: Callable[..., Stack], weightless_model: Path) -> None:
    with collecting() as collector:
        arguments = ("--trace-endpoint", collector.endpoint)
        stack = start_stack(model=weightless_model, engine="scripted", gateway_args=arguments, scheduler_args=arguments)
        headers = {"traceparent": f"00-{TRACE}-{CLIENT}-01", "x-request-id": "traced"}
        body = {"model": "tiny", "prompt": "a secret prompt", "max_tokens": 5, "seed": 1, "ignore_eos": True}
        assert stack.client.post("/v1/completions", json=body, headers=headers).is_success
        assert stack.client.post("/v1/completions", json=body | {"model": "no"}, headers=headers).status_code == 404
        for service in (stack.gateway, stack.scheduler):
            service.terminate()  # which sends what is left
        eventually(lambda: stack.gateway.ended and stack.scheduler.ended)
    whole, refused = sorted(collector.named("gateway.request"), key=lambda span: span.start_time_unix_nano)
    assert [attributes(span)["http.response.status_code"] for span in (whole, refused)] == [200, 404]
    assert {span.parent_span_id.hex() for span in (whole, refused)} == {CLIENT}
    (request,) = collector.named("scheduler.request")
    assert request.parent_span_id == whole.span_id
    assert (attributes(request)["lockstep.request_id"], attributes(request)["lockstep.completion_tokens"]) == ("traced", 5)
    assert {span.trace_id.hex() for _, span in collector.spans} == {TRACE}
    assert [span.name for _, span in collector.spans if span.parent_span_id == request.span_id] == [
        "scheduler.queue", "scheduler.prefill", "scheduler.decode",
    ]  # fmt: skip
    assert all("secret" not in str(span) for _, span in collector.spans)
