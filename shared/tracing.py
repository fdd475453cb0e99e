"""Spans of OpenTelemetry, sent to a collector by OTLP over HTTP; the W3C trace context goes from service to service in any case.

Without an endpoint nothing is recorded, and the packages of the extra `tracing` are not needed.
"""

import asyncio
import contextlib
import importlib.metadata
import logging
from collections.abc import AsyncIterator

from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.errors import ConfigError

logger = logging.getLogger(__name__)

EXPORT_TIMEOUT_S = 2.0  # of one attempt; spans that cannot be sent are dropped, and nobody waits for them

_PROPAGATOR = TraceContextTextMapPropagator()


def context_of(traceparent: str, tracestate: str = "") -> Context:
    """Of these headers of a caller; anything that is not well-formed is as if absent."""
    return _PROPAGATOR.extract({"traceparent": traceparent, "tracestate": tracestate}, Context())


def traceparent_of(span: Span) -> str:
    """The header for whoever is called within the span; "" when there is no trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
    return carrier.get("traceparent", "")


@contextlib.asynccontextmanager
async def tracing(service: str, endpoint: str | None, ratio: float) -> AsyncIterator[Tracer]:
    """A tracer while the block runs; what it has not sent by then is sent. Without `endpoint` it records nothing.

    ratio: share of the traces that begin here which are recorded, 0 to 1; for others, their beginning decides.
    Raises ConfigError when the extra `tracing` is not installed.
    """
    if endpoint is None:
        yield NoOpTracer()
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise ConfigError(f"trace_endpoint: tracing needs the extra 'tracing' (pip install 'lockstep[tracing]'): {error}") from error
    version = importlib.metadata.version("lockstep")
    exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(ratio)),
        resource=Resource.create({"service.name": service, "service.version": version}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    logger.info("spans go to %s", endpoint)
    try:
        yield provider.get_tracer("lockstep", version)
    finally:
        await asyncio.to_thread(provider.shutdown)
