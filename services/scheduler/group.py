"""One worker group: its queue, its slots and pages, the plans on their way. A state machine without I/O, told the time.

`submit`, `end`, `on_result` and `on_time` are all that can happen to it; each sends the plans that the lead rule then allows.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from services.scheduler import batching
from services.scheduler.admission import Admissions
from services.scheduler.gathering import Gathering
from services.scheduler.health import Health
from services.scheduler.lead import Lead, StepTimes
from services.scheduler.memory import Memory
from services.scheduler.meter import Meter, Throughput
from services.scheduler.metrics import EngineMetrics, EngineState
from services.scheduler.pages import InvariantError
from services.scheduler.policy import POLICIES, PolicyName
from services.scheduler.requests import End, Finished, Request
from services.scheduler.scores import Records, by_row, by_token
from services.scheduler.slots import Slots, SlotState
from services.scheduler.steps import Outstanding, StepResult, add_biases, admission
from services.scheduler.tenants import Tenants
from services.scheduler.waiting import Rank, WaitingQueue, rank
from shared.errors import ProtocolError
from shared.protocol.generation_pb2 import FINISH_REASON_ERROR
from shared.protocol.plan import FAILED_ROW, Int32s, Limits, Plan, PlanFlag, RowFlag

MAX_ADMISSIONS = 256  # of one plan: 32 KB
MAX_PLAN_BIASES = 2048  # of one plan: 32 KB
FAILED = Finished(FINISH_REASON_ERROR, "the model's output was not finite")
_NO_ROWS = np.empty(0, dtype=np.int32)
STOPPED_EARLY = Finished(FINISH_REASON_ERROR, "the worker ended the request for a reason that the scheduler does not know")

Deliver = Callable[[list[Request], float], None]  # requests that have new tokens or have ended, and the time


def longest_request(limits: Limits) -> int:
    """Tokens of the longest request that fits a group. The last token of a request is never written to the cache."""
    return min(limits.max_length, (limits.pages - 1) * limits.page_size + 1)


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
        self.slots = Slots(limits, highest_slot_epoch)
        self.memory = Memory(limits, self.slots, prefix_cache)
        self.tenants = Tenants()
        self.waiting = WaitingQueue(self.tenants)
        self.lead = Lead(overlap, bursts, jump)
        self.step_times = StepTimes()
        self.num_running = 0
        self.lead_us = 0  # of work queued behind the plan that runs, by estimate
        self.all_failed_results = 0  # in a row: rows failed, and none brought a token
        self.metrics = metrics
        self._prefill_rate = Throughput()  # of steps with prefill
        self._ended = Meter(0.0)  # requests
        self._max_step_tokens = min(max_step_tokens, limits.max_step_tokens)
        self._policy = POLICIES[policy]
        self._admissions = Admissions(self.waiting, self.slots, self.memory, limits.page_size)
        self._send, self._deliver, self._wake = send, deliver, wake
        self._gathering = Gathering()
        self._waking = False  # `on_time` will be called
        self._gathers = False  # newcomers wait for others: nobody is admitted
        self._outstanding: dict[int, Outstanding] = {}  # by plan id, in the order sent
        self._queued_us = 0  # sum of their estimates
        self._jumping_us = 0  # of those among them that jump
        self._next_plan_id = 0
        self._prefilling: dict[int, None] = {}  # slots in state PREFILL, in order of admission
        self._leaving: list[int] = []  # slots that are being preempted
        self._retired: list[int] = []
        self._releases: list[int] = []  # retired slots whose done flag the device does not know to set
        self._updated: dict[Request, None] = {}  # to deliver
        self._concluded = 0  # of these, that have ended
        self._now = 0.0  # the time of what is handled

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
        return self.waiting.tokens + int((self.slots.target - self.slots.planned)[list(self._prefilling)].sum())

    @property
    def room(self) -> int:
        """How many more requests could start at once, for all that is known of their size."""
        return max(self.slots.num_free - len(self.waiting), 0)

    def has_room(self, request: Request) -> bool:
        """Whether this one could start at once, and come on by a page."""
        pages = self.memory.free * self.limits.page_size
        return self.room > 0 and request.max_length <= self.max_length and request.length + self.limits.page_size <= pages

    @property
    def passed(self) -> int:
        """The id up to which every plan has passed."""
        return next(iter(self._outstanding), self._next_plan_id) - 1

    @property
    def oldest(self) -> Outstanding | None:
        """The first of the plans that are on their way."""
        return self._outstanding.get(self.passed + 1)

    @property
    def num_outstanding(self) -> int:
        return len(self._outstanding)

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

    def wait_s(self, now: float) -> float:
        """How long a request that comes now would wait before it can start, by measured rates; 0 while none is known.

        The prompts before it have to be computed and, when all slots are taken, as many requests have to end as wait for one.
        """
        rate = self._prefill_rate.per_second
        wait_s = self.backlog_tokens / rate if rate else 0.0
        if not self.slots.num_free and (rate := self._ended.per_second(now)):
            wait_s = max(wait_s, (len(self.waiting) + 1) / rate)
        return wait_s

    def submit(self, request: Request, now: float, *, followed: bool = False) -> None:
        """Queues a request of at most `max_length` tokens. followed: others come at the same time, and then `on_time`."""
        step_us = self.step_times.estimate(self.num_running, 0) if self.num_running else 0
        self._gathering.on_arrival(now, alone=not len(self.waiting), step_us=step_us)
        self.waiting.push(request)
        if not followed:
            self._advance(now)

    def on_time(self, now: float) -> None:
        """Time has passed, or all have come that come together."""
        self._waking = False
        self._advance(now)

    def end(self, request: Request, end: End, now: float) -> None:
        """Ends a waiting or running request for a reason that the device does not know: cancelled, out of time."""
        if request.slot is None:
            self.waiting.remove(request)
            self._conclude(request, end)
        else:
            self.retire(request.slot, end, release=True)
        self._advance(now)

    def on_result(self, result: StepResult, now: float) -> None:
        """Takes the result of an outstanding plan. Raises ProtocolError when it cannot be that."""
        plan = self._outstanding.get(result.plan_id)
        if plan is None:
            raise ProtocolError(f"a result for plan {result.plan_id}, which is not outstanding")
        self._now = now
        plan.check(result, self.limits.vocab_size)
        self._count_failures(result.ids)
        oldest = self.passed + 1 == result.plan_id
        self._queued_us -= plan.estimate_us
        self._jumping_us -= plan.estimate_us * plan.jumps
        step_us = max((result.end_us - result.start_us) // len(result.ids), 1)
        self.step_times.observe(plan.decode_rows, plan.prefill_tokens, step_us)
        self.lead.on_computed(result.end_us - result.start_us)
        if plan.prefill_tokens:
            self._prefill_rate.count(plan.prefill_tokens, step_us / 1e6)
        self.lead.on_result(round((now - plan.sent_at) * 1e6) - result.hold_us, result.late_us if plan.followed else 0)
        self.metrics.plan(plan.decode_rows, plan.prefill_tokens, len(result.ids))
        records = self._take_prompt_scores(result, plan) if len(result.logprobs) else {}
        for later, ids in zip(range(len(result.ids) - 1, -1, -1), result.ids, strict=True):
            self.metrics.step(plan.decode_rows + plan.prefill_tokens, step_us / 1e6)
            current = self.slots.epoch[plan.slots] == result.slot_epochs
            self._confirm(result.plan_id, plan.slots[current & (ids == FAILED_ROW)].tolist())
            self._take(ids, plan, current, records, now - later * step_us / 1e6)  # a burst's tokens came one after the other
        del self._outstanding[result.plan_id]  # not before: what is on its way for a slot that is given up has been taken
        if oldest:
            self._gathering.on_result(self._queued_us, self.lead.round_trip_us, now)
            self._finalise_passed()
        self._advance(now)

    def retire(self, slot: int, end: End | None, *, release: bool) -> None:
        """The one way out of a slot: no further rows or grants; finalised once its last plan has passed.

        end: of the request; None when it waits for another slot, elsewhere if it is leaving. release: the device must be told that the
        row is done.
        """
        slots = self.slots
        request = slots.requests[slot]
        if request is None:
            raise InvariantError(f"slot {slot} is retired and has no running request")
        self._stop_rows(slot)
        if slot in self._leaving:
            self._leaving.remove(slot)
        slots.state[slot] = SlotState.RETIRED
        slots.requests[slot] = None
        slots.ids[slot] = request.prefill_ids[: min(request.reusable, int(slots.planned[slot]))]
        self.tenants.leave(request.tenant)
        self._retired.append(slot)
        self.num_running -= 1
        request.slot = None
        if end is None and request.leaving:
            self._updated[request] = None
        elif end is None:
            self.metrics.preempted()
            request.preemptions += 1
            request.timeline.add(self._now, "preempted", self.name, len(request.output))
            self.waiting.push(request)
        else:
            self._conclude(request, end)
        if slots.last_plan[slot] <= self.passed:
            self._finalise_passed()
        elif release:
            self._releases.append(slot)

    def preempt(self, slot: int) -> None:
        """Takes the slot from its request, once what is on its way for it has come."""
        self._stop_rows(slot)
        self.slots.state[slot] = SlotState.LEAVING
        self._leaving.append(slot)
        if self.slots.last_plan[slot] <= self.passed:
            self.retire(slot, None, release=False)

    def move(self, request: Request, now: float) -> None:
        """Gives up a running request: it is delivered without an end and without a slot once what is on its way for it has come."""
        request.leaving = True
        if request.slot is not None and request.slot not in self._leaving:
            self.preempt(request.slot)
        self._advance(now)

    def running(self) -> list[Request]:
        """The requests that have a slot."""
        return [request for request in self.slots.requests if request is not None]

    def _stop_rows(self, slot: int) -> None:
        self.memory.end_promise(slot)
        self._prefilling.pop(slot, None)
        self._admissions.on_left(slot)

    def evacuate(self) -> list[Request]:
        """Takes every request from a group that is lost: running ones first, then those that wait. The group is of no use afterwards."""
        left = [request for request in self._updated if request.leaving and request.slot is None and request.end is None]  # untold
        self.paused = True
        begun = self.running() + left
        for request in begun:
            request.slot = None
            request.moves += 1
            request.unplanned_moves += not self.draining
        self._updated.clear()  # all have been told, or are returned; a timer may still call
        return begun + self.waiting.drain()

    def ended(self) -> list[Request]:
        """Requests that had ended when the group was lost, and that nobody was told of."""
        return [request for request in self._updated if request.end is not None]

    def _finalise_passed(self) -> None:
        passed, slots = self.passed, self.slots
        while (slot := next((slot for slot in self._leaving if slots.last_plan[slot] <= passed), None)) is not None:
            self.retire(slot, None, release=False)
        gone = [slot for slot in self._retired if slots.last_plan[slot] <= passed]
        for slot in gone:
            self._retired.remove(slot)
            ids = slots.ids[slot]
            assert ids is not None  # it is retired
            self.memory.cache.close(slot, slots.pages(slot), ids, int(slots.last_plan[slot]))
            slots.free(slot)
            if slot in self._releases:
                self._releases.remove(slot)
        self.memory.pool.pass_to(passed)

    def _conclude(self, request: Request, end: End) -> None:
        request.end = end
        self._updated[request] = None
        self._concluded += 1

    def _advance(self, now: float) -> None:
        """Sends what the lead rule allows, then delivers: the device comes first."""
        self._now = now
        if not self.paused:
            self._send_plans(now)
        if self._updated:
            updated = list(self._updated)
            self._updated.clear()
            self._ended.count(self._concluded, now)
            self._concluded = 0
            self._deliver(updated, now)

    def _send_plans(self, now: float) -> None:
        self._gather(now)
        while self.lead.may_jump(len(self._outstanding), self._jumping_us) and (plan := self._next_plan(now, jump=True)) is not None:
            self._send(plan)
        self._measure_lead()
        while self.lead.may_send(len(self._outstanding), self.lead_us) and (plan := self._next_plan(now)) is not None:
            self._send(plan)
            self._measure_lead()

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

    # Results

    def _count_failures(self, ids: Int32s) -> None:
        """Rows without a token that have not failed either, done ones and chunks, tell nothing."""
        if (ids >= 0).any():
            self.all_failed_results = 0
        elif (ids == FAILED_ROW).any():
            self.all_failed_results += 1

    def _confirm(self, plan_id: int, failed: list[int]) -> None:
        """A plan has written what it should, but for the slots whose rows were not finite: nobody uses what those have computed.

        Who did so, begins again with the tokens that came before.
        """
        users = [user for slot in failed for user in self.memory.cache.fail(slot, self._next_plan_id - 1)]
        self.memory.cache.confirm(plan_id)
        for user in users:
            if self.slots.requests[user] is not None:
                self.retire(user, FAILED if user in failed else None, release=user not in failed)

    def _take_prompt_scores(self, result: StepResult, plan: Outstanding) -> Records:
        """Keeps what a result tells of prompts; returns all that it tells."""
        failed = []
        for row, run in by_row(result.logprobs[result.logprobs["row"] >= plan.decode_rows]):
            slot = int(plan.slots[row])
            request = self.slots.requests[slot]
            if request is None or request.scores is None or self.slots.epoch[slot] != result.slot_epochs[row]:
                continue
            of_prompt = run[run["position"] < len(request.prompt_ids)]
            if len(of_prompt):
                if not request.scores.take_prompt(of_prompt):
                    failed.append(slot)
                self._updated[request] = None
        if failed:
            self._confirm(result.plan_id, failed)
        return by_token(result.logprobs)

    def _take(self, ids: Int32s, plan: Outstanding, current: NDArray[np.bool_], records: Records, now: float) -> None:
        """One iteration. What a plan sent ahead brought for a slot that has been retired or used anew since is dropped.

        current: which rows are of their slots' present use.
        """
        slots = self.slots
        live = plan.samples & current & slots.are_running(plan.slots)
        rows, tokens = plan.slots[live], ids[live]
        self._time(rows[tokens >= 0], now)
        slots.confirmed[rows] += tokens >= 0
        for row, slot, token in zip(np.flatnonzero(live).tolist(), rows.tolist(), tokens.tolist(), strict=True):
            request = slots.requests[slot]
            assert request is not None  # it is running
            if token < 0:
                self.retire(slot, STOPPED_EARLY, release=False)
                continue
            self._updated[request] = None
            if request.scores is not None:
                request.scores.take_token(records.get((row, request.length)))
            reason = request.append(token)
            if reason is not None:
                self.retire(slot, Finished(reason), release=False)

    def _time(self, rows: Int32s, now: float) -> None:
        """For the metrics: each of these slots has a token now."""
        gaps_s = now - self.slots.last_token_at[rows]
        self.slots.last_token_at[rows] = now
        self.metrics.tokens(gaps_s)
        for slot in rows[np.isnan(gaps_s)].tolist():
            request = self._request(slot)
            assert request.admitted_at is not None  # likewise
            request.timeline.add(now, "first_token", self.name, len(request.output) + 1)
            if not request.output:  # it was not resumed
                self.metrics.first_token(len(request.prompt_ids), request.admitted_at - request.arrived_at, now - request.admitted_at)
            if request.first_token_at is None:
                request.first_token_at = now

    # Plans

    def _next_plan(self, now: float, jump: bool = False) -> Plan | None:
        """The next step or burst, entered into the books as sent; None when there is nothing to compute.

        jump: one that runs before plans already sent. So it is disjoint from them: only requests that are admitted now, and no release.
        """
        slots, budget = self.slots, self._max_step_tokens
        if jump and not self._may_come():
            return None
        plan = Plan(self._next_plan_id)
        admitted: list[int] = []

        def admit(most_tokens: int | None) -> int | None:
            return self._admit(most_tokens, plan, admitted, now)

        could_decode = decodes = _NO_ROWS
        if not jump:
            could_decode = self._make_room()
            waits = bool(self._prefilling) or self._may_come()
            decodes = self._decode_rows(could_decode, self._policy(budget) if waits else budget)
        self._admissions.begin(self._reserve(decodes) if len(self.waiting) else 0, jump)
        chunks = batching.prefill_chunks(slots, [] if jump else list(self._prefilling), admit, budget - len(decodes))
        self._admissions.end()
        if not chunks and len(decodes) < len(could_decode):  # nobody came for what was kept for prompts
            decodes = self._decode_rows(could_decode, budget)
        if not len(decodes) and not chunks:
            return None
        plan.decode_slots = decodes
        plan.decode_flags = np.full(len(decodes), RowFlag.SAMPLE, dtype=np.int32)
        if chunks:
            self._add_prefill(plan, chunks)
        step_us = self.step_times.estimate(len(decodes), len(plan.prefill_ids))
        plan.iterations = 1 if chunks else self._burst(decodes, step_us)
        plan.estimate_us = step_us * plan.iterations
        if jump:
            plan.flags = PlanFlag.JUMP
            self.lead.on_jump(plan.estimate_us)
        written, rows = self._written(decodes, plan.iterations), decodes
        if chunks:
            written, rows = np.concatenate((written, plan.prefill_starts + plan.prefill_lengths)), plan.row_slots
        self.memory.grant(plan, rows, written, self.passed)
        if admitted:
            plan.admissions = np.concatenate([self._admission(slot) for slot in admitted])
        if self._releases and not jump:
            plan.release_slots = np.array(self._releases, dtype=np.int32)
            slots.last_plan[plan.release_slots] = plan.plan_id  # a slot is not used anew while its release is on the way
            self._releases.clear()
        samples = (np.concatenate((plan.decode_flags, plan.prefill_flags)) & RowFlag.SAMPLE) != 0
        slots.planned[rows] = written + samples
        slots.last_plan[rows] = plan.plan_id
        self.tenants.charge(slots.tenant[decodes], plan.iterations)
        if chunks:
            self.tenants.charge(slots.tenant[plan.prefill_slots], plan.prefill_lengths)
        for chunk in chunks:
            self._request(chunk.slot).timeline.add(now, "chunk", self.name, chunk.length, chunk.start)
            self.memory.cache.write(chunk.slot, slots.page_table[chunk.slot], chunk.start + chunk.length, plan.plan_id)
            self._admissions.on_written(chunk.slot)
        self._outstanding[plan.plan_id] = Outstanding(
            slots=rows,
            samples=samples,
            decode_rows=len(decodes),
            prefill_tokens=len(plan.prefill_ids),
            iterations=plan.iterations,
            estimate_us=plan.estimate_us,
            sent_at=now,
            followed=bool(self._outstanding),
            jumps=jump,
        )
        self._queued_us += plan.estimate_us
        self._gathering.on_sent(plan.estimate_us, now)
        self._jumping_us += plan.estimate_us * jump
        self._next_plan_id += 1
        return plan

    def _may_come(self) -> bool:
        """Whether somebody might be admitted."""
        return not self._gathers and self._admissions.may_come()

    def _written(self, decodes: Int32s, iterations: int) -> Int32s:
        """Tokens in the cache after so many iterations of these rows: each writes the last token that its slot may have so far, and the
        device stops it at its greatest length."""
        slots = self.slots
        written: Int32s = np.minimum(slots.planned[decodes] + iterations, slots.max_length[decodes]) - 1
        return written

    def _burst(self, decodes: Int32s, step_us: int) -> int:
        """Iterations of a plan of decode rows: no more than the longest of them may run, and one when memory is short."""
        left = self.slots.max_length[decodes] - self.slots.planned[decodes]
        iterations = min(self.lead.burst(step_us), int(left.max()))
        if iterations == 1:
            return 1
        return iterations if self.memory.beyond(decodes, self._written(decodes, iterations)).sum() <= self.memory.free else 1

    def _decode_rows(self, rows: Int32s, most: int) -> Int32s:
        """Those of `rows`, which may all run, that have a page to write to."""
        rows = batching.decode_rows(self.slots, rows, most)
        return self.memory.affordable(rows, self.slots.planned[rows])

    def _reserve(self, decodes: Int32s) -> int:
        """Pages to keep for requests that run, as many as they may take until one that is given back now is here: a lead and a plan later.

        decodes: what runs now, and takes its pages in any case. Nothing is kept when nobody runs.
        """
        step_us = self.step_times.estimate(self.num_running, 0)
        reserve = self.memory.reserve(self.num_running, self.lead.target_us / step_us + self.lead.burst(step_us))
        return max(reserve, int(self.memory.beyond(decodes, self.slots.planned[decodes]).sum()))

    def _make_room(self) -> Int32s:
        """Preempts a request when pages run out, one at a time: of the tenant that has had the most, the youngest.

        Never the oldest of all, which therefore ends, and none that has not come on by a page since it was preempted last.
        Returns the slots that may have a decode row.
        """
        slots, memory = self.slots, self.memory
        rows = slots.may_decode()
        if memory.is_plentiful or self._leaving:
            return rows
        growth = int(memory.beyond(rows, slots.planned[rows]).sum())
        if not growth:
            return rows
        coming = memory.pool.num_cooling + int(slots.num_pages[self._retired].sum())
        if memory.free + coming >= max(growth, self._reserve(rows) // 2):
            return rows
        running = [slot for slot in range(self.limits.slots) if slots.requests[slot] is not None]
        oldest = min(running, key=self._rank)
        secure = slots.confirmed < slots.secure_until
        victims = [slot for slot in running if slot != oldest and not secure[slot]]
        if victims:
            self.preempt(max(victims, key=lambda slot: (self.tenants.computed_at(int(slots.tenant[slot])), self._rank(slot))))
        return slots.may_decode()

    def _rank(self, slot: int) -> Rank:
        return rank(self._request(slot))

    def _request(self, slot: int) -> Request:
        request = self.slots.requests[slot]
        assert request is not None  # it is running
        return request

    def _add_prefill(self, plan: Plan, chunks: list[batching.Chunk]) -> None:
        pieces = []
        for chunk in chunks:
            ids = self.slots.ids[chunk.slot]
            assert ids is not None  # it is in state PREFILL
            pieces.append(ids[chunk.start : chunk.start + chunk.length])
            if chunk.last:
                self.slots.state[chunk.slot] = SlotState.DECODE
                del self._prefilling[chunk.slot]
        plan.prefill_slots = np.array([chunk.slot for chunk in chunks], dtype=np.int32)
        plan.prefill_starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        plan.prefill_lengths = np.array([chunk.length for chunk in chunks], dtype=np.int32)
        plan.prefill_flags = np.array(
            [RowFlag.SAMPLE * chunk.last | RowFlag.SCORE * self._request(chunk.slot).needs_scores for chunk in chunks], dtype=np.int32
        )
        plan.prefill_ids = np.concatenate(pieces)

    def _admit(self, most_tokens: int | None, plan: Plan, admitted: list[int], now: float) -> int | None:
        """Admits the next request with this plan, notes its slot in `admitted` and returns it; see `Admissions.next`."""
        found = self._admissions.next(most_tokens) if len(admitted) < MAX_ADMISSIONS and not self._gathers else None
        if found is None:
            return None
        request, ids = found
        if len(plan.bias_ids) + len(request.sampling.biases) > MAX_PLAN_BIASES:
            return None
        slots, page_size = self.slots, self.limits.page_size
        request.slot = slot = slots.admit(request, ids)
        slots.tenant[slot] = self.tenants.join(request.tenant)
        self.waiting.remove(request)
        slots.secure_until[slot] = len(ids) + page_size if request.preemptions else 0
        pages = self.memory.admit(slot, request.cache_salt, ids, reuse=not request.needs_scores)
        if request.sampling.biases:
            add_biases(plan, slot, request.sampling.biases)
        plan.grant_slots = np.concatenate((plan.grant_slots, np.full(len(pages), slot, dtype=np.int32)))
        plan.grant_indexes = np.concatenate((plan.grant_indexes, np.arange(len(pages), dtype=np.int32)))
        plan.grant_pages = np.concatenate((plan.grant_pages, pages))
        self.metrics.admitted(len(pages) * page_size, len(request.prompt_ids) if request.admitted_at is None else None)
        request.timeline.add(now, "admitted", self.name, len(ids), len(pages) * page_size)
        if request.admitted_at is None:
            request.admitted_at = now
            request.cached_tokens = min(len(pages) * page_size, len(request.prompt_ids))
        self.num_running += 1
        self._prefilling[slot] = None
        admitted.append(slot)
        return slot

    def _admission(self, slot: int) -> NDArray[np.void]:
        request = self.slots.requests[slot]
        assert request is not None  # it was admitted just now
        return admission(slot, int(self.slots.epoch[slot]), request)
