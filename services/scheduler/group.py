"""One worker group: its queue, its slots and pages, the plans on their way. A state machine without I/O, told the time.

`submit`, `end`, `on_result` and `on_time` are all that can happen to it; each sends the plans that the lead rule then allows.
"""

from collections.abc import Callable
from typing import NamedTuple

from services.scheduler.ends import End
from services.scheduler.gathering import Gathering
from services.scheduler.gauges import EngineState
from services.scheduler.health import Health
from services.scheduler.lead import Lead, StepTimes
from services.scheduler.meter import Throughput
from services.scheduler.metrics import EngineMetrics
from services.scheduler.occupancy import Occupancy
from services.scheduler.planner import Planner
from services.scheduler.policy import PolicyName
from services.scheduler.requests import Request
from services.scheduler.results import Results
from services.scheduler.steps import Outstanding, StepResult
from shared.errors import ProtocolError
from shared.protocol.plan import Limits, Plan

Deliver = Callable[[list[Request], float], None]  # requests that have new tokens or have ended, and the time


def longest_request(limits: Limits) -> int:
    """Tokens of the longest request that fits a group. The last token of a request is never written to the cache."""
    return min(limits.max_length, (limits.pages - 1) * limits.page_size + 1)


class PlanTimes(NamedTuple):
    """Of a plan whose result is in, in seconds: on the scheduler's clock when it was made and when its result came, on the worker's, which
    on one host is the same, when it began and ended; and how long the worker had it."""

    made_at_s: float
    began_at_s: float
    ended_at_s: float
    result_at_s: float
    hold_s: float


class Group:
    """Admits, plans, takes results. `send` gets each plan, `deliver` the requests that have new tokens or have ended.

    wake: has `on_time` called after so many seconds, or a little earlier or later. Without it newcomers never wait for others.
    """

    def __init__(
        self,
        name: str,
        limits: Limits,
        highest_slot_epoch: int,
        max_step_tokens: int,
        overlap: bool,
        send: Callable[[Plan], None],
        deliver: Deliver,
        metrics: EngineMetrics,
        bursts: bool = True,
        jump: bool = True,
        policy: PolicyName = "mixed",
        prefix_cache: bool = True,
        wake: Callable[[float], None] | None = None,
        health: Health | None = None,
    ) -> None:
        self.name = name
        self.health = health or Health()
        self.limits = limits
        self.draining = False  # no new requests
        self.paused = False  # no new plans
        self.occupancy = Occupancy(name, limits, highest_slot_epoch, prefix_cache, metrics)
        self.slots, self.memory = self.occupancy.slots, self.occupancy.memory
        self.tenants, self.waiting = self.occupancy.tenants, self.occupancy.waiting
        self.lead = Lead(overlap, bursts, jump)
        self.step_times = StepTimes()
        self.planner = Planner(
            name, limits, min(max_step_tokens, limits.max_step_tokens), policy, self.occupancy, self.lead, self.step_times
        )
        self.results = Results(name, self.occupancy, metrics)
        self.lead_us = 0  # of work queued behind the plan that runs, by estimate
        self.metrics = metrics
        self.last_times: PlanTimes | None = None  # of the last result
        self._prefill_rate = Throughput()  # of steps with prefill
        self._full_rate = Throughput()  # of those among them that are full: a queue is computed in such, small prompts alone never are
        self._send, self._deliver, self._wake = send, deliver, wake
        self._gathering = Gathering()
        self._waking = False  # `on_time` will be called
        self._gathers = False  # newcomers wait for others: nobody is admitted
        self._outstanding: dict[int, Outstanding] = {}  # by plan id, in the order sent
        self._queued_us = 0  # sum of their estimates
        self._jumping_us = 0  # of those among them that jump
        self._next_plan_id = 0

    @property
    def max_length(self) -> int:
        """Tokens of the longest request that fits."""
        return longest_request(self.limits)

    @property
    def load(self) -> int:
        """Requests that it has."""
        return len(self.waiting) + self.num_running

    @property
    def backlog_tokens(self) -> int:
        """Tokens that are left to prefill, of all requests that it has."""
        return self.waiting.tokens + int((self.slots.target - self.slots.planned)[list(self.occupancy.prefilling)].sum())

    @property
    def room(self) -> int:
        """How many more requests could start at once, for all that is known of their size."""
        return max(self.slots.num_free - len(self.waiting), 0)

    def has_room(self, request: Request) -> bool:
        """Whether this one could start at once, and come on by a page."""
        pages = self.memory.free * self.limits.page_size
        return self.room > 0 and request.max_length <= self.max_length and request.length + self.limits.page_size <= pages

    @property
    def num_running(self) -> int:
        return self.occupancy.num_running

    @property
    def passed(self) -> int:
        """The id up to which every plan has passed."""
        return self.occupancy.passed

    @property
    def oldest(self) -> Outstanding | None:
        """The first of the plans that are on their way."""
        return self._outstanding.get(self.passed + 1)

    @property
    def num_outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def all_failed_results(self) -> int:
        """Results in a row in which rows failed, and none brought a token."""
        return self.results.all_failed

    def state(self) -> EngineState:
        """For the metrics; may be called from any thread."""
        return EngineState(
            ready=self.health.is_well and not self.draining,
            running=self.num_running,
            waiting=len(self.waiting),
            waiting_tokens=self.waiting.tokens,
            kv_usage=self.memory.usage,
            pages=self.memory.state(),
            page_size=self.limits.page_size,
            num_pages=self.limits.pages - 1,
            outstanding_plans=len(self._outstanding),
            lead_s=self.lead_us / 1e6,
            lead_target_s=self.lead.target_us / 1e6,
            prefill_tokens_per_s=self._prefill_rate.per_second,
        )

    def wait_s(self) -> float:
        """How long a request that comes now would wait before it can start, by measured rates; 0 while none is known.

        The prompts before it have to be computed and, when all slots are taken, as many requests have to end as wait for one: by how long
        those that ended had theirs, since that none has ended lately tells nothing of when the next one does.
        """
        rate = self._full_rate.per_second
        wait_s = self.backlog_tokens / rate if rate else 0.0
        if not self.slots.num_free:
            wait_s = max(wait_s, (len(self.waiting) + 1) * self.occupancy.stay_s.value / self.limits.slots)
        return wait_s

    def submit(self, request: Request, now: float, *, followed: bool = False) -> None:
        """Queues a request of at most `max_length` tokens. followed: others come at the same time, and then `on_time`."""
        step_us = self.step_times.estimate(self.num_running, 0) if self.num_running else 0
        self._gathering.on_arrival(now, alone=not len(self.waiting), step_us=step_us)
        self.waiting.push(request)
        if not followed:
            self.occupancy.finalise_passed()
            self._advance(now)

    def on_time(self, now: float) -> None:
        """Time has passed, or all have come that come together."""
        self._waking = False
        self.occupancy.finalise_passed()
        self._advance(now)

    def end(self, request: Request, end: End, now: float) -> None:
        """Ends a waiting or running request for a reason that the device does not know: cancelled, out of time."""
        if request.slot is None:
            self.waiting.remove(request)
            self.occupancy.conclude(request, end)
        else:
            self.occupancy.retire(request.slot, end, release=True)
        self._advance(now)

    def on_result(self, result: StepResult, now: float) -> bool:
        """Takes the result of an outstanding plan. Returns whether it has a token. Raises ProtocolError when it cannot be that."""
        plan = self._outstanding.get(result.plan_id)
        if plan is None:
            raise ProtocolError(f"a result for plan {result.plan_id}, which is not outstanding")
        extremes = _, greatest = plan.check(result, self.limits.vocab_size)
        self.occupancy.now = now
        self._queued_us -= plan.estimate_us
        self._jumping_us -= plan.estimate_us * plan.jumps
        self._learn(result, plan, now)
        self.results.take(result, plan, extremes, self._next_plan_id - 1)
        del self._outstanding[result.plan_id]  # not before: what is on its way for a slot that is given up has been taken
        wake = self._wake if self.occupancy.retired and not self.load else None  # nobody has a use yet for what is freed
        if result.plan_id == self.passed + 1:
            self.occupancy.passed = next(iter(self._outstanding), self._next_plan_id) - 1
            self._gathering.on_result(self._queued_us, self.lead.round_trip_us, now)
            if wake is None:
                self.occupancy.finalise_passed()
        self._advance(now)
        if wake is not None:
            wake(0.0)  # to finalise then: tokens would wait for it, 20 us a slot
        return greatest >= 0

    def _learn(self, result: StepResult, plan: Outstanding, now: float) -> None:
        """What its times tell, for later plans and for the metrics."""
        step_us = result.step_us
        self.last_times = PlanTimes(plan.sent_at, result.start_us / 1e6, result.end_us / 1e6, now, result.hold_us / 1e6)
        self.step_times.observe(plan.decode_rows, plan.prefill_tokens, step_us)
        self.lead.on_computed(result.end_us - result.start_us)
        self.lead.on_result(round((now - plan.sent_at) * 1e6) - result.hold_us, result.late_us if plan.followed else 0)
        if plan.prefill_tokens:
            self._prefill_rate.count(plan.prefill_tokens, step_us / 1e6)
            if plan.decode_rows + plan.prefill_tokens >= self.planner.max_step_tokens:
                self._full_rate.count(plan.prefill_tokens, step_us / 1e6)
        self.metrics.plan(plan.decode_rows, plan.prefill_tokens, len(result.ids))
        self.metrics.steps(len(result.ids), plan.decode_rows + plan.prefill_tokens, step_us / 1e6)

    def move(self, request: Request, now: float) -> None:
        """Gives up a running request: it is delivered without an end and without a slot once what is on its way for it has come."""
        request.leaving = True
        if request.slot is not None and request.slot not in self.occupancy.leaving:
            self.occupancy.preempt(request.slot)
        self._advance(now)

    def running(self) -> list[Request]:
        """The requests that have a slot."""
        return self.occupancy.running()

    def evacuate(self) -> list[Request]:
        """Takes every request from a group that is lost: running ones first, then those that wait. The group is of no use afterwards."""
        self.paused = True
        return self.occupancy.evacuate(planned=self.draining)

    def ended(self) -> list[Request]:
        """Requests that had ended when the group was lost, and that nobody was told of."""
        return self.occupancy.ended()

    def _advance(self, now: float) -> None:
        """Sends what the lead rule allows, then delivers: the device comes first."""
        self.occupancy.now = now
        if not self.paused:
            self._send_plans(now)
        if updated := self.occupancy.take_updated():
            self._deliver(updated, now)

    def _send_plans(self, now: float) -> None:
        self._gather(now)
        while self.lead.may_jump(len(self._outstanding), self._jumping_us) and self._send_next(now, jump=True):
            pass
        self._measure_lead()
        while self.lead.may_send(len(self._outstanding), self.lead_us) and self._send_next(now, jump=False):
            self._measure_lead()

    def _send_next(self, now: float, *, jump: bool) -> bool:
        """Whether there was something to compute. jump: before plans that were sent already."""
        planned = self.planner.next(self._next_plan_id, now, jump=jump, closed=self._gathers)
        if planned is None:
            return False
        plan, outstanding = planned
        outstanding.followed = bool(self._outstanding)
        self._outstanding[plan.plan_id] = outstanding
        self._next_plan_id += 1
        self._queued_us += plan.estimate_us
        self._gathering.on_sent(plan.estimate_us, now)
        if jump:
            self._jumping_us += plan.estimate_us
            self.lead.on_jump(plan.estimate_us)
        self._send(plan)
        return True

    def _gather(self, now: float) -> None:
        """Decides whether newcomers wait for others. Without anything on its way, the group does not."""
        wait_s = self._gathering.wait_s(now) if self._wake is not None and self._outstanding else 0.0
        self._gathers = wait_s > 0
        if self._wake is not None and self._gathers and not self._waking:
            self._waking = True
            self._wake(wait_s)

    def _measure_lead(self) -> None:
        oldest = self.oldest
        self.lead_us = self._queued_us - oldest.estimate_us if oldest else 0
