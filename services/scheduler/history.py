"""The requests that are here and the last that were, with what they went through: for the log, for traces, for /debug/requests.

Nothing here holds a token id or a text. The pages are asked for by threads of the admin port while the event loop goes on: each number
is right, all together nearly so.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from opentelemetry.trace import NoOpTracer, Tracer, set_span_in_context

from services.scheduler.ends import Finished
from services.scheduler.requests import Request, RequestTimes
from services.scheduler.timeline import phases, text
from shared.protocol.generation_pb2 import FinishReason, RejectReason
from shared.tracing import context_of

logger = logging.getLogger(__name__)

MAX_ENDED = 256  # that are remembered
MAX_LISTED = 1_000  # of the live ones

JSON = dict[str, Any]


class History:
    """Told of each request's end."""

    def __init__(self, tracer: Tracer | None = None, log_requests: bool = False) -> None:
        """log_requests: a line for each request at level info, not only at debug."""
        self._tracer = tracer or NoOpTracer()
        self._log_level = logging.INFO if log_requests else logging.DEBUG
        self._ended: deque[JSON] = deque(maxlen=MAX_ENDED)

    def ended(self, request: Request, group: str, times: RequestTimes) -> None:
        """Logs it and, on demand, its timeline, sends its spans, remembers it."""
        now = times.ended_at
        request.timeline.add(now, "ended", group, len(request.output))
        self._ended.append(_described(request, now))
        logger.info(
            "a request has ended",
            extra={
                "request_id": request.request_id,
                "attempt": request.attempt,
                "group": group or None,
                "end": _end(request),
                "detail": request.end and request.end.detail,
                "prompt_tokens": len(request.prompt_ids),
                "completion_tokens": len(request.output),
                "queue_s": round(times.queue_s, 4),
                "ttft_s": None if times.ttft_s is None else round(times.ttft_s, 4),
                "total_s": round(times.total_s, 4),
            },
        )
        if logger.isEnabledFor(self._log_level):
            way = text(request.timeline, request.arrived_at)
            logger.log(self._log_level, "the way of a request", extra={"request_id": request.request_id, "timeline": way})
        self._trace(request, now)

    def page(self, live: Iterable[Request], now: float) -> JSON:
        """What /debug/requests answers; `live` may be more than are listed."""
        requests = list(live)
        listed = requests[:MAX_LISTED]
        return {
            "live": [_described(request, now) for request in listed],
            "live_not_listed": len(requests) - len(listed),
            "ended": list(self._ended)[::-1],
        }

    def _trace(self, request: Request, now: float) -> None:
        wall_ns = time.time_ns() - round(now * 1e9)  # the tracing system's clock, of the moment called 0

        def ns(at: float) -> int:
            return wall_ns + round(at * 1e9)

        root = self._tracer.start_span("scheduler.request", context_of(request.traceparent), start_time=ns(request.arrived_at))
        if not root.is_recording():
            return
        root.set_attributes(
            {
                "lockstep.request_id": request.request_id,
                "lockstep.attempt": request.attempt,
                "lockstep.end": _end(request) or "",
                "lockstep.prompt_tokens": len(request.prompt_ids),
                "lockstep.cached_tokens": request.cached_tokens or 0,
                "lockstep.completion_tokens": len(request.output),
                "lockstep.preemptions": request.preemptions,
            }
        )
        for event in request.timeline:
            attributes: dict[str, str | int] = {
                "lockstep.group": event.group,
                "lockstep.tokens": event.tokens,
                "lockstep.known_tokens": event.known,
            }
            root.add_event(event.what, attributes, ns(event.at))
        inside = set_span_in_context(root)
        for phase in phases(request.timeline, request.arrived_at):
            span = self._tracer.start_span(f"scheduler.{phase.name}", inside, start_time=ns(phase.began_at))
            span.set_attribute("lockstep.group", phase.group)
            if phase.name != "queue":
                span.set_attribute("lockstep.tokens", phase.tokens)
            if phase.name == "prefill":
                span.set_attributes({"lockstep.cached_tokens": phase.cached_tokens, "lockstep.chunks": phase.chunks})
            span.end(ns(phase.ended_at))
        root.end(ns(now))


def _end(request: Request) -> str | None:
    if request.end is None:
        return None
    reason = FinishReason.Name(request.end.reason) if isinstance(request.end, Finished) else RejectReason.Name(request.end.reason)
    return reason.removeprefix("FINISH_REASON_").removeprefix("REJECT_REASON_").lower()


def _described(request: Request, now: float) -> JSON:
    """What of a request may be shown: sizes, times and names, no token and no salt."""
    return {
        "request_id": request.request_id,
        "session": request.key.session,
        "request": request.key.request,
        "attempt": request.attempt,
        "tenant": request.tenant,
        "priority": request.priority,
        "arrived_at_s": round(request.arrived_at, 6),  # on the monotonic clock of this host
        "age_s": round(now - request.arrived_at, 6),
        "end": _end(request),
        "slot": request.slot,
        "prompt_tokens": len(request.prompt_ids),
        "cached_tokens": request.cached_tokens,
        "completion_tokens": len(request.output),
        "max_tokens": request.max_tokens,
        "preemptions": request.preemptions,
        "skips": request.skips,
        "events": [
            {
                "at_s": round(event.at - request.arrived_at, 6),
                "what": event.what,
                "group": event.group,
                "tokens": event.tokens,
                "known": event.known,
            }
            for event in request.timeline
        ],
        "events_dropped": request.timeline.dropped,
    }
