"""One worker group: its queue, its slots and pages, the plans on their way. A state machine without I/O, told the time.

`submit`, `end` and `on_result` are all that can happen to it; each sends the plans that the lead rule then allows.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from services.scheduler import batching
from services.scheduler.lead import Lead, StepTimes
from services.scheduler.metrics import EngineMetrics, EngineState
from services.scheduler.pages import InvariantError, PagePool, PageState
from services.scheduler.requests import End, Finished, Request
from services.scheduler.slots import Slots, SlotState
from services.scheduler.steps import Outstanding, StepResult, admission
from services.scheduler.waiting import WaitingQueue
from shared.errors import ProtocolError
from shared.protocol.generation_pb2 import FINISH_REASON_ERROR
from shared.protocol.plan import FAILED_ROW, Int32s, Limits, Plan, PlanFlag, RowFlag

MAX_ADMISSIONS = 256  # of one plan: 32 KB
FAILED = Finished(FINISH_REASON_ERROR, "the model's output was not finite")
_NO_ROWS = np.empty(0, dtype=np.int32)
STOPPED_EARLY = Finished(FINISH_REASON_ERROR, "the worker ended the request for a reason that the scheduler does not know")

Deliver = Callable[[list[Request], float], None]  # requests that have new tokens or have ended, and the time


def longest_request(limits: Limits) -> int:
    """Tokens of the longest request that fits a group. The last token of a request is never written to the cache."""
    return min(limits.max_length, (limits.pages - 1) * limits.page_size + 1)


class Group:
    """Admits, plans, takes results. `send` gets each plan, `deliver` the requests that have new tokens or have ended."""

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
    ) -> None:
        self.name = name
        self.limits = limits
        self.draining = False  # no new requests
        self.pool = PagePool(limits.pages)
        self.slots = Slots(limits, highest_slot_epoch)
        self.waiting = WaitingQueue()
        self.lead = Lead(overlap, bursts, jump)
        self.step_times = StepTimes()
        self.promised_pages = 0  # that running requests will still be granted
        self.num_running = 0
        self.lead_us = 0  # of work queued behind the plan that runs, by estimate
        self.metrics = metrics
        self._max_step_tokens = min(max_step_tokens, limits.max_step_tokens)
        self._send, self._deliver = send, deliver
        self._outstanding: dict[int, Outstanding] = {}  # by plan id, in the order sent
        self._queued_us = 0  # sum of their estimates
        self._jumping_us = 0  # of those among them that jump
        self._next_plan_id = 0
        self._prefilling: dict[int, None] = {}  # slots in state PREFILL, in order of admission
        self._retired: list[int] = []
        self._releases: list[int] = []  # retired slots whose done flag the device does not know to set
        self._updated: dict[Request, None] = {}  # to deliver

    @property
    def max_length(self) -> int:
        """Tokens of the longest request that fits."""
        return longest_request(self.limits)

    @property
    def load(self) -> int:
        """Requests, for routing."""
        return len(self.waiting) + self.num_running

    @property
    def passed(self) -> int:
        """The id up to which every plan has passed."""
        return next(iter(self._outstanding), self._next_plan_id) - 1

    @property
    def num_outstanding(self) -> int:
        return len(self._outstanding)

    def state(self) -> EngineState:
        """For the metrics; may be called from any thread."""
        usable = self.limits.pages - 1
        return EngineState(
            ready=not self.draining,
            running=self.num_running,
            waiting=len(self.waiting),
            waiting_tokens=self.waiting.tokens,
            kv_usage=1 - self.pool.num_ready / usable,
            pages={state.name.lower(): self.pool.count(state) for state in (PageState.READY, PageState.OWNED, PageState.COOLING)},
            page_size=self.limits.page_size,
            num_pages=usable,
            outstanding_plans=len(self._outstanding),
            lead_s=self.lead_us / 1e6,
            lead_target_s=self.lead.target_us / 1e6,
        )

    def submit(self, request: Request, now: float) -> None:
        """Queues a request of at most `max_length` tokens."""
        self.waiting.push(request)
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
        plan.check(result, self.limits.vocab_size)
        oldest = self.passed + 1 == result.plan_id
        del self._outstanding[result.plan_id]
        self._queued_us -= plan.estimate_us
        self._jumping_us -= plan.estimate_us * plan.jumps
        step_us = max((result.end_us - result.start_us) // len(result.ids), 1)
        self.step_times.observe(plan.decode_rows, plan.prefill_tokens, step_us)
        self.lead.on_result(round((now - plan.sent_at) * 1e6) - result.hold_us, result.late_us if plan.followed else 0)
        for later, ids in zip(range(len(result.ids) - 1, -1, -1), result.ids, strict=True):
            self.metrics.step(plan.decode_rows + plan.prefill_tokens, step_us / 1e6)
            self._take(ids, plan, result.slot_epochs, now - later * step_us / 1e6)  # a burst's tokens came one after the other
        if oldest:
            self._finalise_passed()
        self._advance(now)

    def retire(self, slot: int, end: End | None, *, release: bool) -> None:
        """The one way out of a slot: no further rows or grants; finalised once its last plan has passed.

        end: of the request; None when it leaves the slot to go on elsewhere. release: the device must be told that the row is done.
        """
        request = self.slots.requests[slot]
        if request is None:
            raise InvariantError(f"slot {slot} is retired and has no running request")
        self.promised_pages -= self._pages(request) - int(self.slots.num_pages[slot])
        self.slots.state[slot] = SlotState.RETIRED
        self.slots.requests[slot] = self.slots.prefill_ids[slot] = None
        self._prefilling.pop(slot, None)
        self._retired.append(slot)
        self.num_running -= 1
        request.slot = None
        if end is None:
            self.metrics.preempted()
        else:
            self._conclude(request, end)
        if self.slots.last_plan[slot] <= self.passed:
            self._finalise_passed()
        elif release:
            self._releases.append(slot)

    def evacuate(self) -> list[Request]:
        """Takes every request from a group that is lost: running ones first, then those that wait. The group is of no use afterwards."""
        running = [request for request in self.slots.requests if request is not None]
        for request in running:
            request.slot = None
        return running + self.waiting.drain()

    def _finalise_passed(self) -> None:
        passed = self.passed
        still = []
        for slot in self._retired:
            if self.slots.last_plan[slot] > passed:
                still.append(slot)
                continue
            self.pool.cool(slot, self.slots.pages(slot), int(self.slots.last_plan[slot]))
            self.slots.free(slot)
            if slot in self._releases:
                self._releases.remove(slot)
        self._retired = still
        self.pool.pass_to(passed)

    def _conclude(self, request: Request, end: End) -> None:
        request.end = end
        self._updated[request] = None

    def _advance(self, now: float) -> None:
        """Sends what the lead rule allows, then delivers: the device comes first."""
        while self.lead.may_jump(len(self._outstanding), self._jumping_us) and (plan := self._next_plan(now, jump=True)) is not None:
            self._send(plan)
        self._measure_lead()
        while self.lead.may_send(len(self._outstanding), self.lead_us) and (plan := self._next_plan(now)) is not None:
            self._send(plan)
            self._measure_lead()
        if self._updated:
            updated = list(self._updated)
            self._updated.clear()
            self._deliver(updated, now)

    def _measure_lead(self) -> None:
        oldest = self._outstanding.get(self.passed + 1)
        self.lead_us = self._queued_us - oldest.estimate_us if oldest else 0

    # Results

    def _take(self, ids: Int32s, plan: Outstanding, slot_epochs: Int32s, now: float) -> None:
        """One iteration. What a plan sent ahead brought for a slot that has been retired or used anew since is dropped."""
        slots = self.slots
        live = plan.samples & (slots.epoch[plan.slots] == slot_epochs) & slots.are_running(plan.slots)
        rows, tokens = plan.slots[live], ids[live]
        self._time(rows[tokens >= 0], now)
        slots.confirmed[rows] += tokens >= 0
        for slot, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            request = slots.requests[slot]
            assert request is not None  # it is running
            if token < 0:
                self.retire(slot, FAILED if token == FAILED_ROW else STOPPED_EARLY, release=False)
                continue
            self._updated[request] = None
            reason = request.append(token)
            if reason is not None:
                self.retire(slot, Finished(reason), release=False)

    def _time(self, rows: Int32s, now: float) -> None:
        """For the metrics: each of these slots has a token now."""
        gaps_s = now - self.slots.last_token_at[rows]
        self.slots.last_token_at[rows] = now
        self.metrics.tokens(gaps_s)
        for slot in rows[np.isnan(gaps_s)].tolist():
            request = self.slots.requests[slot]
            assert request is not None  # it is running
            assert request.admitted_at is not None  # likewise
            if not request.output:  # it was not resumed
                self.metrics.first_token(len(request.prompt_ids), request.admitted_at - request.arrived_at, now - request.admitted_at)
            if request.first_token_at is None:
                request.first_token_at = now

    # Plans

    def _next_plan(self, now: float, jump: bool = False) -> Plan | None:
        """The next step or burst, entered into the books as sent; None when there is nothing to compute.

        jump: one that runs before plans already sent. So it is disjoint from them: only requests that are admitted now, and no release.
        """
        slots = self.slots
        admitted: list[int] = []
        if jump:
            decodes, candidates = _NO_ROWS, self._admissions(admitted, now)
        else:
            decodes = batching.decode_rows(slots, self._max_step_tokens, prefill_waits=bool(self._prefilling) or self._head_fits())
            candidates = self._prefill_candidates(admitted, now)
        chunks = batching.prefill_chunks(slots, candidates, self._max_step_tokens - len(decodes))
        if not len(decodes) and not chunks:
            return None
        plan = Plan(self._next_plan_id)
        plan.decode_slots = decodes
        plan.decode_flags = np.full(len(decodes), RowFlag.SAMPLE, dtype=np.int32)
        if jump:
            plan.flags = PlanFlag.JUMP
        if chunks:
            self._add_prefill(plan, chunks)
        step_us = self.step_times.estimate(len(decodes), len(plan.prefill_ids))
        plan.iterations = 1 if chunks else self._burst(decodes, step_us)
        plan.estimate_us = step_us * plan.iterations
        # A decode row writes the last token that it may have so far, and the device stops it at its greatest length.
        written = np.minimum(slots.planned[decodes] + plan.iterations, slots.max_length[decodes]) - 1
        written = np.concatenate((written, plan.prefill_starts + plan.prefill_lengths))
        rows = plan.row_slots
        plan.grant_slots, plan.grant_indexes = slots.missing_pages(rows, written)
        if len(plan.grant_slots):
            plan.grant_pages = self.pool.grant(plan.grant_slots)
            slots.add_pages(plan.grant_slots, plan.grant_indexes, plan.grant_pages)
            self.promised_pages -= len(plan.grant_slots)
        if admitted:
            plan.admissions = np.concatenate([self._admission(slot) for slot in admitted])
        if self._releases and not jump:
            plan.release_slots = np.array(self._releases, dtype=np.int32)
            slots.last_plan[plan.release_slots] = plan.plan_id  # a slot is not used anew while its release is on the way
            self._releases.clear()
        samples = np.concatenate((plan.decode_flags, plan.prefill_flags)) == RowFlag.SAMPLE
        slots.planned[rows] = written + samples
        slots.last_plan[rows] = plan.plan_id
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
        self._jumping_us += plan.estimate_us * jump
        self._next_plan_id += 1
        return plan

    def _burst(self, decodes: Int32s, step_us: int) -> int:
        """Iterations of a plan of decode rows: no more than the longest of them may run."""
        left = self.slots.max_length[decodes] - self.slots.planned[decodes]
        return min(self.lead.burst(step_us), int(left.max()))

    def _add_prefill(self, plan: Plan, chunks: list[batching.Chunk]) -> None:
        pieces = []
        for chunk in chunks:
            ids = self.slots.prefill_ids[chunk.slot]
            assert ids is not None  # it is in state PREFILL
            pieces.append(ids[chunk.start : chunk.start + chunk.length])
            if chunk.last:
                self.slots.state[chunk.slot] = SlotState.DECODE
                self.slots.prefill_ids[chunk.slot] = None
                del self._prefilling[chunk.slot]
        plan.prefill_slots = np.array([chunk.slot for chunk in chunks], dtype=np.int32)
        plan.prefill_starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        plan.prefill_lengths = np.array([chunk.length for chunk in chunks], dtype=np.int32)
        plan.prefill_flags = np.array([RowFlag.SAMPLE if chunk.last else 0 for chunk in chunks], dtype=np.int32)
        plan.prefill_ids = np.concatenate(pieces)

    def _prefill_candidates(self, admitted: list[int], now: float) -> Iterator[int]:
        """Slots whose prefill goes on, then requests as they are admitted."""
        yield from list(self._prefilling)
        yield from self._admissions(admitted, now)

    def _admissions(self, admitted: list[int], now: float) -> Iterator[int]:
        """Slots of requests as they are admitted, which is noted in `admitted`."""
        while len(admitted) < MAX_ADMISSIONS and self._head_fits():
            request = self.waiting.head()
            assert request is not None  # it fits
            self.waiting.remove(request)
            request.slot = slot = self.slots.admit(request)
            if request.admitted_at is None:
                request.admitted_at = now
            self.promised_pages += self._pages(request)
            self.num_running += 1
            self._prefilling[slot] = None
            admitted.append(slot)
            yield slot

    def _head_fits(self) -> bool:
        """Whether the next request can be admitted: with pages up to its end, so that whoever runs can finish."""
        request = self.waiting.head()
        if request is None or not self.slots.num_free:
            return False
        return self._pages(request) <= self.pool.num_ready - self.promised_pages

    def _pages(self, request: Request) -> int:
        return -(-(request.max_length - 1) // self.limits.page_size)

    def _admission(self, slot: int) -> NDArray[np.void]:
        request = self.slots.requests[slot]
        assert request is not None  # it was admitted just now
        return admission(slot, int(self.slots.epoch[slot]), request)
