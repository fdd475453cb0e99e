"""Spans reach a collector, nothing is recorded without one, and the trace context is handed on in either case."""

import asyncio
import subprocess
import sys
import time

import pytest

from shared.errors import ConfigError
from shared.tracing import context_of, traceparent_of, tracing
from tests.otlp import collecting

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{CALLER}-01"


async def test_spans_reach_the_collector_under_the_trace_of_their_caller() -> None:
    with collecting() as collector:
        async with tracing("lockstep-test", collector.endpoint, 1.0) as tracer:
            with tracer.start_as_current_span("outer", context_of(HEADER)) as outer:
                handed_on = traceparent_of(outer)
        ((service, span),) = collector.spans
    assert (service, span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("lockstep-test", "outer", TRACE, CALLER)
    assert handed_on == f"00-{TRACE}-{span.span_id.hex()}-01"


@pytest.mark.parametrize("header, recorded", [(f"00-{TRACE}-{CALLER}-01", True), (f"00-{TRACE}-{CALLER}-00", False), ("", False)])
async def test_who_began_the_trace_decides_and_else_the_ratio(header: str, recorded: bool) -> None:
    with collecting() as collector:
        async with tracing("lockstep-test", collector.endpoint, 0.0) as tracer:
            tracer.start_span("span", context_of(header)).end()
        assert len(collector.spans) == recorded


async def test_without_a_collector_the_context_passes_and_nothing_is_recorded() -> None:
    async with tracing("lockstep-test", None, 1.0) as tracer:
        span = tracer.start_span("span", context_of(HEADER))
        assert not span.is_recording()
        assert traceparent_of(span) == HEADER
        assert traceparent_of(tracer.start_span("span", context_of("00-nonsense"))) == ""


async def test_a_collector_that_is_gone_holds_nobody_up() -> None:
    with collecting() as collector:
        pass
    began = time.monotonic()
    async with tracing("lockstep-test", collector.endpoint, 1.0) as tracer:
        for _ in range(100):
            tracer.start_span("span").end()
        assert time.monotonic() - began < 2
    assert time.monotonic() - began < 10


def test_without_a_collector_the_extra_is_not_needed() -> None:
    """Not even imported, by the scheduler's own entry point."""
    code = "import sys, services.scheduler.__main__; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_the_extra_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    async def start() -> None:
        async with tracing("lockstep-test", "http://127.0.0.1:9", 1.0):
            pass

    with pytest.raises(ConfigError, match="extra 'tracing'"):
        asyncio.run(start())
