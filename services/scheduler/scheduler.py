"""All requests and all groups of this scheduler: what comes in, where it goes, when it is given up. Without I/O, told the time."""

import heapq
import logging
from collections import OrderedDict

from services.scheduler import routing
from services.scheduler.group import Deliver, Group
from services.scheduler.meter import Meter
from services.scheduler.metrics import EngineState, RequestTimes, SchedulerMetrics
from services.scheduler.model import Model
from services.scheduler.requests import End, Finished, Key, Rejected, Request
from services.scheduler.validation import Refused, to_request
from services.scheduler.waiting import WaitingQueue
from shared.protocol.generation_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_ERROR,
    FINISH_REASON_STOP,
    REJECT_REASON_DEADLINE,
    REJECT_REASON_OVERLOADED,
    REJECT_REASON_TOO_LONG,
    REJECT_REASON_UNAVAILABLE,
    FinishReason,
    RejectReason,
    Submit,
)

logger = logging.getLogger(__name__)

MAX_TOMBSTONES = 10_000
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0

CANCELLED = Finished(FINISH_REASON_CANCELLED)
STOPPED = Finished(FINISH_REASON_STOP, "a stop string")
SUPERSEDED = Finished(FINISH_REASON_CANCELLED, "a newer attempt took over")
LOST = Finished(FINISH_REASON_ERROR, "the worker group was lost")
OUT_OF_TIME = Finished(FINISH_REASON_ERROR, "the deadline passed")
TOO_LATE = Rejected(REJECT_REASON_DEADLINE, "the deadline passed before the request could start")
TOO_LONG = Rejected(REJECT_REASON_TOO_LONG, "prompt and completion exceed the KV cache of every worker group")
UNAVAILABLE = Rejected(REJECT_REASON_UNAVAILABLE, "no worker group is ready")


class Scheduler:
    """While no group is ready, requests are held for at most `group_wait_s`; but not before the first group was ready, since until
    then nothing is known of the model."""

    def __init__(
        self,
        max_waiting_requests: int,
        max_waiting_tokens: int,
        group_wait_s: float,
        deliver: Deliver,
        metrics: SchedulerMetrics,
        now: float,
    ) -> None:
        self.model: Model | None = None
        self.groups: list[Group] = []
        self._max_waiting_requests, self._max_waiting_tokens = max_waiting_requests, max_waiting_tokens
        self._group_wait_s = group_wait_s
        self._deliver = deliver
        self._metrics = metrics
        self._requests: dict[Key, Request] = {}  # that have not ended
        self._group_of: dict[Request, Group] = {}
        self._held = WaitingQueue()  # until a group is ready
        self._held_until: dict[Request, float] = {}
        self._deadlines: list[tuple[float, Key, int]] = []  # a heap of (deadline, request, attempt)
        self._tombstones: OrderedDict[Key, int] = OrderedDict()  # highest attempt cancelled of requests that are unknown
        self._ended = Meter(now)
        metrics.no_engine.watch(lambda: EngineState(waiting=len(self._held), waiting_tokens=self._held.tokens))

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    # From gateways

    def submit(self, submit: Submit, session: int, now: float) -> Rejected | None:
        """Takes a request, or returns why not. A higher attempt retires a lower one."""
        rejected = self._submit(submit, session, now)
        if rejected is not None:
            self._metrics.rejected(rejected.reason)
        return rejected

    def _submit(self, submit: Submit, session: int, now: float) -> Rejected | None:
        if self.model is None:
            return UNAVAILABLE
        older = self._requests.get(Key(session, submit.request))
        if older is not None:
            if older.attempt >= submit.attempt:
                logger.warning("request %s: attempt %d is not above %d: ignored", older.request_id, submit.attempt, older.attempt)
                return None
            self._end(older, SUPERSEDED, now)
        try:
            request = to_request(submit, session, self.model, now)
        except Refused as error:
            return Rejected(error.reason, str(error))
        reason = request.finish_reason() if request.resumed_at else None
        if self._tombstones.pop(request.key, 0) >= request.attempt:
            request.end = CANCELLED
        elif reason is not None:  # all had been delivered but its end
            request.end = Finished(reason)
        if request.end is not None:
            self._log_end(request, None, now)
            self._deliver([request], now)
            return None
        rejected = (None if request.resumed_at else self._overload(request, now)) or self._place(request, now)
        if rejected is None and request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.key, request.attempt))
        return rejected

    def cancel(self, key: Key, attempt: int, now: float, *, stopped: bool = False, accepted_tokens: int | None = None) -> None:
        """Ends a request, now or when its Submit comes. `stopped`: its gateway has met a stop string, and so the whole answer.

        accepted_tokens: of the completion, that are part of the answer; None: all.
        """
        request = self._requests.get(key)
        if request is not None and request.attempt <= attempt:
            request.accepted_tokens = accepted_tokens
            self._end(request, STOPPED if stopped else CANCELLED, now)
        elif request is None:
            self._tombstones[key] = max(attempt, self._tombstones.get(key, 0))
            if len(self._tombstones) > MAX_TOMBSTONES:
                self._tombstones.popitem(last=False)

    def drop_session(self, session: int, now: float) -> None:
        """The gateway is gone: nobody waits for its requests."""
        for request in [request for request in self._requests.values() if request.key.session == session]:
            self._end(request, CANCELLED, now)

    # From workers

    def add_group(self, group: Group, now: float) -> None:
        """A group is ready."""
        self.groups.append(group)
        self._share()
        group.metrics.watch(group.state)
        held = self._held.drain()
        self._held_until.clear()
        self._place_anew(held, now)

    def drain_group(self, group: Group, now: float) -> None:
        """A group is about to stop: it gets nothing new, and what waits there goes elsewhere."""
        group.draining = True
        self._place_anew(group.waiting.drain(), now)

    def remove_group(self, group: Group, now: float) -> None:
        """A group is lost, and so are its requests."""
        self.groups.remove(group)
        self._share()
        group.metrics.unwatch(group.state)
        requests = group.evacuate()
        for request in requests:  # to recover them: place each anew, with the output it has
            request.end = LOST
        self.deliver(requests, now)

    def _share(self) -> None:
        for group in self.groups:
            group.lead.share(len(self.groups))

    def deliver(self, updated: list[Request], now: float) -> None:
        """What groups call: forgets the requests that have ended and passes all on."""
        for request in updated:
            if request.end is not None:
                del self._requests[request.key]
                self._log_end(request, self._group_of.pop(request, None), now)
                self._ended.count(1, now)
        self._deliver(updated, now)

    def _log_end(self, request: Request, group: Group | None, now: float) -> None:
        """Counts it, too: once for each request, whatever the number of its attempts."""
        end = request.end
        times = RequestTimes(request.arrived_at, request.admitted_at, request.first_token_at, now)
        if isinstance(end, Rejected):
            self._metrics.rejected(end.reason)
        elif end is not None and end is not SUPERSEDED:
            engine = group.metrics if group is not None else self._metrics.no_engine
            engine.ended(end.reason, len(request.prompt_ids), len(request.output), request.max_tokens, times)
        logger.info(
            "a request has ended",
            extra={
                "request_id": request.request_id,
                "attempt": request.attempt,
                "group": group.name if group is not None else None,
                "end": end and (FinishReason.Name(end.reason) if isinstance(end, Finished) else RejectReason.Name(end.reason)),
                "detail": end and end.detail,
                "prompt_tokens": len(request.prompt_ids),
                "completion_tokens": len(request.output),
                "queue_s": round(times.queue_s, 4),
                "ttft_s": None if times.ttft_s is None else round(times.ttft_s, 4),
                "total_s": round(times.total_s, 4),
            },
        )

    # Time

    def tick(self, now: float) -> None:
        """Ends what has waited too long; to be called a few times a second."""
        for request, until in list(self._held_until.items()):
            if until > now:
                break  # they were held in this order
            self._end(request, UNAVAILABLE if not request.resumed_at else LOST, now)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, key, attempt = heapq.heappop(self._deadlines)
            due = self._requests.get(key)
            if due is not None and due.attempt == attempt:
                started = due.slot is not None or due.output
                self._end(due, OUT_OF_TIME if started else TOO_LATE, now)

    def _place(self, request: Request, now: float) -> Rejected | None:
        groups = [group for group in self.groups if not group.draining]
        group = routing.choose(groups, request)
        if group is None and groups:
            return TOO_LONG
        self._requests[request.key] = request
        if group is None:
            self._group_of.pop(request, None)
            self._held.push(request)
            self._held_until[request] = now + self._group_wait_s
        else:
            self._group_of[request] = group
            group.submit(request, now)
        return None

    def _end(self, request: Request, end: End, now: float) -> None:
        if self._held_until.pop(request, None) is None:
            self._group_of[request].end(request, end, now)
        else:
            self._held.remove(request)
            request.end = end
            self.deliver([request], now)

    def _place_anew(self, requests: list[Request], now: float) -> None:
        for request in requests:
            rejected = self._place(request, now)
            if rejected is not None:
                request.end = rejected
                self.deliver([request], now)

    def _too_late(self, request: Request, now: float) -> Rejected | None:
        """Better refused now than given up when its deadline has passed."""
        wait_s = min((group.wait_s(now) for group in self.groups if not group.draining), default=0.0)
        if request.deadline is None or now + wait_s < request.deadline:
            return None
        retry_s = min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)
        return Rejected(REJECT_REASON_DEADLINE, f"it would start in {wait_s:.1f} s, after its deadline", round(retry_s * 1e3))

    def _overload(self, request: Request, now: float) -> Rejected | None:
        requests = len(self._held) + sum(len(group.waiting) for group in self.groups)
        tokens = self._held.tokens + sum(group.waiting.tokens for group in self.groups)
        if requests < self._max_waiting_requests and (not requests or tokens + request.length <= self._max_waiting_tokens):
            return self._too_late(request, now)
        rate = self._ended.per_second(now)
        retry_s = min(max(requests / rate if rate else 0.0, MIN_RETRY_S), MAX_RETRY_S)
        return Rejected(REJECT_REASON_OVERLOADED, f"{requests} requests of {tokens} tokens wait already", round(retry_s * 1e3))
