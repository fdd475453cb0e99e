"""All requests and all groups of this scheduler: what comes in, where it goes, when it is given up. Without I/O, told the time."""

import logging
from collections.abc import Callable, Iterable

from services.scheduler import routing
from services.scheduler.deadlines import Deadlines
from services.scheduler.early_cancels import EarlyCancels
from services.scheduler.ends import (
    CANCELLED,
    FAILED,
    LOST,
    LOST_TOO_OFTEN,
    MAX_UNPLANNED_MOVES,
    OUT_OF_TIME,
    STOPPED,
    SUPERSEDED,
    TOO_LONG,
    UNAVAILABLE,
    End,
    Finished,
    Rejected,
)
from services.scheduler.gauges import EngineState
from services.scheduler.group import Deliver, Group
from services.scheduler.history import History
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.model import Model
from services.scheduler.overload import Overload
from services.scheduler.requests import Key, Request
from services.scheduler.steps import StepResult
from services.scheduler.validation import Refused, to_request
from services.scheduler.waiting import WaitingQueue
from shared.protocol.generation_pb2 import Submit

logger = logging.getLogger(__name__)


class Scheduler:
    """While no group can take them, requests are held for at most `group_wait_s`; but not before the first group was ready, since until
    then nothing is known of the model. A request goes on in another group with the output it has: see docs/recovery.md."""

    def __init__(
        self,
        max_waiting_requests: int,
        max_waiting_tokens: int,
        group_wait_s: float,
        deliver: Deliver,
        metrics: SchedulerMetrics,
        now: float,
        history: History | None = None,
        later: Callable[[Callable[[], None]], object] = lambda work: work(),
    ) -> None:
        """later: does what nobody waits for, when what was delivered before is on its way."""
        self.model: Model | None = None
        self.groups: list[Group] = []
        self._load = Overload(max_waiting_requests, max_waiting_tokens, now)
        self._group_wait_s = group_wait_s
        self._deliver = deliver
        self._metrics = metrics
        self._history, self._later = history or History(), later
        self._requests: dict[Key, Request] = {}  # that have not ended
        self._group_of: dict[Request, Group] = {}
        self._placed: dict[Group, None] = {}  # groups that have requests which they were not yet told to begin
        self._held = WaitingQueue()  # until a group can take them
        self._paused = False
        self._deadlines = Deadlines()
        self._early_cancels = EarlyCancels()
        metrics.no_engine.watch(lambda: EngineState(waiting=len(self._held), waiting_tokens=self._held.tokens))

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def requests_page(self, now: float) -> dict[str, object]:
        """The requests that are here and the last that were, for people; callable from any thread."""
        return self._history.page(self._requests.copy().values(), now)

    # From gateways

    def submit(self, submit: Submit, session: int, now: float) -> Rejected | None:
        """Takes a request, or returns why not. A higher attempt retires a lower one."""
        (rejected,) = self.submit_all([submit], session, now)
        return rejected

    def submit_all(self, submits: Iterable[Submit], session: int, now: float) -> list[Rejected | None]:
        """Takes requests that have come together, of which as many as fit then go into one step; for each None, or why not."""
        rejections = [self._submit(submit, session, now) for submit in submits]
        self._start(now)
        for rejected in rejections:
            if rejected is not None:
                self._metrics.rejected(rejected.reason)
        return rejections

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
        if self._early_cancels.take(request.key, request.attempt):
            request.end = CANCELLED
        elif reason is not None:  # all had been delivered but its end
            request.end = Finished(reason)
        if request.end is not None:
            self._count_ends([(request, None)], now)
            self._deliver([request], now)
            return None
        refused = None if request.interrupted else self._load.refuses(request, self._held, self.groups, now)
        rejected = refused or self._place(request, now)
        if rejected is None:
            self._deadlines.add(request)
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
            self._early_cancels.add(key, attempt)

    def drop_session(self, session: int, now: float) -> int:
        """The gateway is gone: nobody waits for its requests. Returns how many they were."""
        left = [request for request in self._requests.values() if request.key.session == session]
        for request in left:
            self._end(request, CANCELLED, now)
        return len(left)

    # From workers

    def add_group(self, group: Group, now: float) -> None:
        """A group is ready."""
        group.paused = self._paused
        self.groups.append(group)
        self._share()
        group.metrics.watch(group.state)
        self._place_anew(self._held.drain(), now)

    def drain_group(self, group: Group, now: float) -> None:
        """A group is about to stop: it gets nothing new, what waits there goes elsewhere, and what runs does as there is room for it."""
        group.draining = True
        self._place_anew(group.waiting.drain(), now, hold=True)
        self._move_running(group, now)

    def on_result(self, group: Group, result: StepResult, now: float) -> None:
        """Takes what a group has computed, and judges it by that. Raises as `Group.on_result`."""
        failed_before = group.all_failed_results
        has_token, health = group.on_result(result, now), group.health
        if has_token:
            if not health.is_well:
                logger.info("group %s computes again", group.name)
            health.succeed()
        elif group.all_failed_results > failed_before and health.fail(now):
            self._tell_ejection(group)
            self._relieve(group, now)

    def remove_group(self, group: Group, now: float, *, overdue: bool = False) -> None:
        """A group is lost: its requests go on elsewhere, or wait for its return. overdue: it was given up, since it answered nothing."""
        self.groups.remove(group)
        self._share()
        if not group.draining:
            self._judge_loss(group, overdue, now)
        group.metrics.unwatch(group.state, planned=group.draining)
        if group.draining and not self._paused:  # paused: it is we who leave
            self._metrics.cut_off("worker", group.load)
        self.deliver(group.ended(), now)
        self._metrics.moved(group.num_running, "drained" if group.draining else "lost")
        requests = group.evacuate()
        too_often = [request for request in requests if request.unplanned_moves > MAX_UNPLANNED_MOVES]
        for request in too_often:
            request.end = LOST_TOO_OFTEN
        self.deliver(too_often, now)
        going_on = [request for request in requests if request.end is None]
        self._deliver([request for request in going_on if request.unplanned_moves > request.told_moves], now)  # this must outlive us
        self._place_anew(going_on, now, hold=True)

    def pause(self) -> None:
        """No group gets any more plans. What is on its way still comes: `settled` tells when all has."""
        self._paused = True
        for group in self.groups:
            group.paused = True

    @property
    def settled(self) -> bool:
        """Whether no plan is on its way."""
        return not any(group.num_outstanding for group in self.groups)

    def _share(self) -> None:
        for group in self.groups:
            group.lead.share(len(self.groups))

    def _judge_loss(self, group: Group, overdue: bool, now: float) -> None:
        """What answers nothing is ejected at once, what breaks off in the middle of its work when it has done nothing but fail before."""
        group.metrics.lost(overdue=overdue)
        if overdue:
            group.health.eject(now)
        if overdue or (group.num_outstanding and group.health.fail(now)):
            self._tell_ejection(group)

    def _relieve(self, group: Group, now: float) -> None:
        """Others get its requests, as far as they have room for those that run at once; without others it goes on as it can."""
        if any(other.health.is_well and not other.draining for other in self.groups):
            self._place_anew(group.waiting.drain(), now)
            self._move_running(group, now)

    def _tell_ejection(self, group: Group) -> None:
        """Logs the first in a row."""
        group.metrics.ejected()
        if group.health.ejections == 1:
            logger.warning("group %s is ejected until it computes something again: every row failed, or nothing came", group.name)

    def deliver(self, updated: list[Request], now: float) -> None:
        """What groups call: forgets the requests that have ended and passes all on. Those that have left a group are placed anew, as are
        those whose row has failed: another group may be able to compute them."""
        left = [request for request in updated if request.leaving and request.slot is None and request.end is None]
        ended = [request for request in updated if request.end is not None]
        failed = [request for request in ended if request.end is FAILED and self._may_go_on(request)]
        for request in failed:
            request.end = None
        gone = [(request, self._group_of.pop(request, None)) for request in ended if request.end is not None]
        for request, _ in gone:
            del self._requests[request.key]
            self._load.on_end(now)
        self._deliver(updated, now)
        if gone:
            self._later(lambda: self._count_ends(gone, now))
        drained = sum(self._group_of[request].draining for request in left)
        self._metrics.moved(drained, "drained")
        self._metrics.moved(len(left) - drained + len(failed), "failed")
        for request in left + failed:
            request.moves += 1
        self._place_anew(left + failed, now, hold=True)

    def _may_go_on(self, request: Request) -> bool:
        """Whether a request whose row has failed is computed anew. It counts as if its group had been lost, since it may itself be the
        cause; not where that group fails them all, and another takes it."""
        group = self._group_of[request]
        if group.health.is_well or not any(other.health.is_well and routing.takes(other, request) for other in self.groups):
            request.unplanned_moves += 1
        request.failed_at += (group,)
        return request.unplanned_moves <= MAX_UNPLANNED_MOVES

    def _count_ends(self, ended: list[tuple[Request, Group | None]], now: float) -> None:
        """Each request once, whatever the number of its attempts, with the group that had it."""
        for request, group in ended:
            end, times = request.end, request.times(now)
            self._history.ended(request, group.name if group is not None else "", times)
            if isinstance(end, Rejected):
                self._metrics.rejected(end.reason)
            elif end is not None and end is not SUPERSEDED:
                engine = group.metrics if group is not None else self._metrics.no_engine
                engine.ended(end.reason, len(request.prompt_ids), len(request.output), request.max_tokens, times)

    # Time

    def tick(self, now: float) -> None:
        """Ends what has waited too long; to be called a few times a second."""
        for request in [request for request in self._held if request.held_until is not None and request.held_until <= now]:
            self._end(request, LOST if request.interrupted or request.output else UNAVAILABLE, now)
        for request in self._deadlines.due(now):
            self._end(request, OUT_OF_TIME, now)
        for group in self.groups:
            if group.draining:
                self._move_running(group, now)

    def _place(self, request: Request, now: float, *, hold: bool = False) -> Rejected | None:
        """hold: it waits for a group that it fits, even if others are there; interrupted requests do in any case."""
        group = routing.place(self.groups, request, now)
        if group is None and request.leaving and self._group_of[request] in self.groups:  # it drains, and whom it left for is gone
            group = self._group_of[request]
        if group is None and not (hold or request.interrupted) and not all(other.draining for other in self.groups):
            return TOO_LONG
        self._requests[request.key] = request
        request.leaving = False
        if group is None:
            self._group_of.pop(request, None)
            self._held.push(request)
            request.timeline.add(now, "held", tokens=len(request.output))
            if request.held_until is None:
                request.held_until = now + self._group_wait_s
        else:
            request.held_until = None
            self._group_of[request] = group
            request.timeline.add(now, "queued", group.name, len(request.output))
            group.submit(request, now, followed=True)
            self._placed[group] = None
        return None

    def _start(self, now: float) -> None:
        """Those that have been placed."""
        groups, self._placed = list(self._placed), {}
        for group in groups:
            group.on_time(now)

    def _end(self, request: Request, end: End, now: float) -> None:
        if request.held_until is None:
            self._group_of[request].end(request, end, now)
        else:
            self._held.remove(request)
            request.end = end
            self.deliver([request], now)

    def _move_running(self, group: Group, now: float) -> None:
        """Lets go of what runs there as far as other groups have room for it at once; the rest goes on where it is."""
        others = [other for other in self.groups if other.health.is_well and not other.draining]
        room = sum(other.room for other in others) - sum(each.leaving for moving in self.groups for each in moving.running())
        for request in group.running():
            if room > 0 and not request.leaving and any(other.has_room(request) for other in others):
                group.move(request, now)
                room -= 1

    def _place_anew(self, requests: list[Request], now: float, *, hold: bool = False) -> None:
        for request in requests:
            rejected = self._place(request, now, hold=hold)
            if rejected is not None:
                request.end = rejected
                self.deliver([request], now)
        self._start(now)
