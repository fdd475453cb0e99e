"""The next step or burst of a group: who runs, who gives way, who is admitted, and the pages for all of it."""

import numpy as np

from services.scheduler import batching
from services.scheduler.lead import Lead, StepTimes
from services.scheduler.occupancy import Occupancy
from services.scheduler.policy import POLICIES, PolicyName
from services.scheduler.slots import Rows
from services.scheduler.steps import Outstanding, add_biases, add_grants, admissions
from services.scheduler.waiting import Rank, rank
from shared.protocol.plan import Int32s, Limits, Plan, PlanFlag, RowFlag

MAX_ADMISSIONS = 256  # of one plan: 32 KB
MAX_PLAN_BIASES = 2048  # of one plan: 32 KB
ENOUGH_CACHED_PAGES = 8192  # of those admitted with one plan, 96 KB: whoever comes after them, however many they are, comes with the next
_SAMPLE, _SCORE = int(RowFlag.SAMPLE), int(RowFlag.SCORE)  # plain: numpy takes ten times as long with an enum
_NO_ROWS: Rows = np.empty(0, dtype=np.intp)


class Planner:
    """Makes plans, which must be sent: they are in the books of slots, pages and tenants then.

    What a step costs here is a few operations on whole arrays; a Python loop runs only over what changes: chunks, admissions.
    """

    def __init__(
        self, group: str, limits: Limits, max_step_tokens: int, policy: PolicyName, occupancy: Occupancy, lead: Lead, step_times: StepTimes
    ) -> None:
        self.max_step_tokens = max_step_tokens
        self._group = group
        self._policy = POLICIES[policy]
        self._occupancy, self._lead, self._step_times = occupancy, lead, step_times
        self._slots, self._memory, self._tenants = occupancy.slots, occupancy.memory, occupancy.tenants
        self._admissions = occupancy.admissions
        self._sampling_flags = np.full(limits.slots, _SAMPLE, dtype=np.int32)
        self._all_sample = np.ones(limits.slots, dtype=np.bool_)

    def next(self, plan_id: int, now: float, *, jump: bool, closed: bool) -> tuple[Plan, Outstanding] | None:
        """The next plan; None when there is nothing to compute.

        jump: one that runs before plans already sent. So it is disjoint from them: only requests that are admitted now, and no release.
        closed: nobody is admitted.
        """
        slots, occupancy = self._slots, self._occupancy
        if jump and (closed or not self._admissions.may_come()):
            return None
        plan = Plan(plan_id)
        decodes, chunks = self._rows(plan, jump, closed)
        if not len(decodes) and not chunks:
            return None
        plan.decode_slots, plan.decode_flags = decodes.astype(np.int32), self._sampling_flags[: len(decodes)]
        if chunks:
            self._add_prefill(plan, chunks)
        step_us = self._step_times.estimate(len(decodes), len(plan.prefill_ids))
        plan.iterations = 1 if chunks else self._burst(decodes, step_us)
        plan.estimate_us = step_us * plan.iterations
        rows, samples, written = decodes, self._all_sample[: len(decodes)], self._written(decodes, plan.iterations)
        if chunks:
            rows = np.concatenate((decodes, plan.prefill_slots))
            samples = np.concatenate((samples, (plan.prefill_flags & _SAMPLE) != 0))
            written = np.concatenate((written, plan.prefill_starts + plan.prefill_lengths))
        self._memory.grant(plan, rows, written, occupancy.passed)
        if jump:
            plan.flags = PlanFlag.JUMP
        elif occupancy.releases:
            plan.release_slots = np.array(occupancy.releases, dtype=np.int32)
            slots.last_plan[plan.release_slots] = plan_id  # a slot is not used anew while its release is on the way
            occupancy.releases.clear()
        slots.planned[rows] = written + samples
        slots.last_plan[rows] = plan_id
        self._tenants.charge(slots.tenant[decodes], plan.iterations)
        self._tenants.charge(slots.tenant[plan.prefill_slots], plan.prefill_lengths)
        for chunk in chunks:
            slots.request(chunk.slot).timeline.add(now, "chunk", self._group, chunk.length, chunk.start)
            self._memory.cache.write(chunk.slot, slots.page_table[chunk.slot], chunk.start + chunk.length, plan_id)
            self._admissions.on_written(chunk.slot)
        return plan, Outstanding(
            slots=rows,
            samples=samples,
            decode_rows=len(decodes),
            prefill_tokens=len(plan.prefill_ids),
            iterations=plan.iterations,
            estimate_us=plan.estimate_us,
            sent_at=now,
            jumps=jump,
        )

    # Decode rows

    def _rows(self, plan: Plan, jump: bool, closed: bool) -> tuple[Rows, list[batching.Chunk]]:
        """The decode rows of a step and its chunks, those of requests that `plan` admits included."""
        budget, prefilling = self.max_step_tokens, self._occupancy.prefilling
        could_decode, beyond = (_NO_ROWS, None) if jump else self._make_room()
        may_come = not closed and self._admissions.may_come()
        decodes = could_decode
        if not jump:
            decodes = self._decode_rows(could_decode, beyond, self._policy(budget) if prefilling or may_come else budget)
        self._admissions.begin(self._reserve(decodes) if may_come else 0, jump)
        if not prefilling and not may_come:
            return decodes, []
        admitted: list[int] = []

        def admit(most_tokens: int | None) -> int | None:
            return self._admit(most_tokens, plan, admitted) if may_come else None

        chunks = batching.prefill_chunks(self._slots, [] if jump else list(prefilling), admit, budget - len(decodes))
        self._admissions.end()
        if admitted:
            epochs = self._slots.epoch[admitted].tolist()
            plan.admissions = admissions(list(zip(admitted, epochs, map(self._slots.request, admitted), strict=True)))
        if not chunks and len(decodes) < len(could_decode):  # nobody came for what was kept for prompts
            decodes = self._decode_rows(could_decode, beyond, budget)
        return decodes, chunks

    def _decode_rows(self, rows: Rows, beyond: Int32s | None, most: int) -> Rows:
        """Those of `rows`, which may all run, that have a page to write to. beyond: see `_make_room`."""
        if len(rows) > most:
            rows = batching.decode_rows(self._slots, rows, most)
            beyond = None if beyond is None else self._beyond(rows)
        return rows if beyond is None else self._memory.affordable(rows, beyond)

    def _make_room(self) -> tuple[Rows, Int32s | None]:
        """Preempts a request when pages run out, one at a time: of the tenant that has had the most, the youngest.

        Never the oldest of all, which therefore ends, and none that has not come on by a page since it was preempted last.
        Returns the slots that may have a decode row and, unless pages are plentiful, those that each of them needs beyond its promise.
        """
        memory, occupancy = self._memory, self._occupancy
        rows = self._slots.may_decode()
        if memory.is_plentiful:
            return rows, None
        beyond = self._beyond(rows)
        growth = int(beyond.sum())
        if not growth or occupancy.leaving:
            return rows, beyond
        coming = memory.pool.num_cooling + int(self._slots.num_pages[occupancy.retired].sum())
        if memory.free + coming >= max(growth, self._reserve(rows, growth) // 2):
            return rows, beyond
        victim = self._victim()
        if victim is None:
            return rows, beyond
        occupancy.preempt(victim)
        rows = self._slots.may_decode()
        return rows, self._beyond(rows)

    def _victim(self) -> int | None:
        slots = self._slots
        running = slots.running()
        victims = running[slots.confirmed[running] >= slots.secure_until[running]]
        if not len(victims):
            return None
        first = slots.arrived_at[running]
        oldest = min(running[first == first.min()].tolist(), key=self._rank)
        victims = victims[victims != oldest]
        if not len(victims):
            return None
        computed = self._tenants.computed_at(slots.tenant[victims])
        victims = victims[computed == computed.max()]
        last = slots.arrived_at[victims]
        youngest: int = max(victims[last == last.max()].tolist(), key=self._rank)
        return youngest

    def _rank(self, slot: int) -> Rank:
        return rank(self._slots.request(slot))

    def _beyond(self, rows: Rows) -> Int32s:
        """Pages, one at most, that each needs for its next row, and was not promised."""
        return self._memory.beyond(rows, self._slots.planned[rows])

    def _reserve(self, decodes: Rows, growth: int | None = None) -> int:
        """Pages to keep for requests that run, as many as they may take until one that is given back now is here: a lead and a plan later.

        decodes: what runs now, and takes its pages, `growth` in all, in any case. Nothing is kept when nobody runs.
        """
        running = self._occupancy.num_running
        step_us = self._step_times.estimate(running, 0)
        reserve = self._memory.reserve(running, self._lead.target_us / step_us + self._lead.burst(step_us))
        return max(reserve, int(self._beyond(decodes).sum()) if growth is None else growth)

    def _written(self, decodes: Rows, iterations: int) -> Int32s:
        """Tokens in the cache after so many iterations of these rows: each writes the last token that its slot may have so far, and the
        device stops it at its greatest length."""
        planned: Int32s = self._slots.planned[decodes]
        if iterations > 1:
            planned = np.minimum(planned + iterations, self._slots.max_length[decodes]) - 1
        return planned

    def _burst(self, decodes: Rows, step_us: int) -> int:
        """Iterations of a plan of decode rows: no more than the longest of them may run, and one when memory is short."""
        iterations = self._lead.burst(step_us)
        if iterations == 1:
            return 1
        left = self._slots.max_length[decodes] - self._slots.planned[decodes]
        iterations = min(iterations, int(left.max()))
        return iterations if self._memory.beyond(decodes, self._written(decodes, iterations)).sum() <= self._memory.free else 1

    # Prompts

    def _admit(self, most_tokens: int | None, plan: Plan, admitted: list[int]) -> int | None:
        """Admits the next request with this plan, notes its slot in `admitted` and returns it; see `Admissions.next`."""
        if len(admitted) >= MAX_ADMISSIONS or len(plan.grant_slots) >= ENOUGH_CACHED_PAGES:
            return None
        found = self._admissions.next(most_tokens)
        if found is None:
            return None
        request, ids = found
        if len(plan.bias_ids) + len(request.sampling.biases) > MAX_PLAN_BIASES:
            return None
        pages = self._occupancy.admit(request, ids)
        slot = request.slot
        assert slot is not None  # it has one now
        if request.sampling.biases:
            add_biases(plan, slot, request.sampling.biases)
        if len(pages):
            add_grants(plan, np.full(len(pages), slot, dtype=np.int32), np.arange(len(pages), dtype=np.int32), pages)
        admitted.append(slot)
        return slot

    def _add_prefill(self, plan: Plan, chunks: list[batching.Chunk]) -> None:
        slots, pieces, flags = self._slots, [], []
        for chunk in chunks:
            ids = slots.ids[chunk.slot]
            assert ids is not None  # it is in state PREFILL
            pieces.append(ids[chunk.start : chunk.start + chunk.length])
            flags.append(_SAMPLE * chunk.last | _SCORE * slots.request(chunk.slot).needs_scores)
            if chunk.last:
                slots.decode(chunk.slot)
                del self._occupancy.prefilling[chunk.slot]
        plan.prefill_slots = np.array([chunk.slot for chunk in chunks], dtype=np.int32)
        plan.prefill_starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        plan.prefill_lengths = np.array([chunk.length for chunk in chunks], dtype=np.int32)
        plan.prefill_flags = np.array(flags, dtype=np.int32)
        plan.prefill_ids = np.concatenate(pieces)
