"""The gateway's span of each request, and the trace context that goes on to the scheduler."""

from opentelemetry.trace import SpanKind, Tracer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.tracing import context_of, traceparent_of


class Traced:
    """Around the whole application. `scope["state"]["traceparent"]` is for whoever is called on behalf of the request."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        caller = context_of(headers.get("traceparent", ""), headers.get("tracestate", ""))
        span = self._tracer.start_span("gateway.request", caller, kind=SpanKind.SERVER)
        state = scope.setdefault("state", {})
        state["traceparent"] = traceparent_of(span)

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                span.add_event("response")
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            span.set_attribute("http.request.method", scope["method"])
            span.set_attribute("url.path", scope["path"][:200])
            span.set_attribute("lockstep.request_id", state.get("request_id", ""))
            span.end()
