"""A device of plain Python that executes plans as a worker must, and trusts none of them.

The key-value cache holds token ids, and the next token is a function of what is read there through the page table: a page that
two slots write, or one that is read too early, changes the answer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from services.scheduler.pages import PagePool, PageState
from services.scheduler.steps import StepResult
from shared.protocol.logprobs import LOGPROB, NO_LOGPROBS
from shared.protocol.plan import NO_FLAGS, NO_TOKEN, SCRATCH_PAGE, Int32s, Limits, Plan, PlanFlag, RowFlag, SlotFlag, check

EOS = 0
FAIL = -2


def next_token(ids: list[int], vocab_size: int) -> int:
    """The model: a function of the whole sequence; EOS about once in `vocab_size` tokens."""
    return crc32(np.array(ids, dtype=np.int32).tobytes()) % vocab_size


def logprob(ids: list[int], token: int) -> float:
    """Of a token after `ids`."""
    return -float(crc32(np.array([*ids, token], dtype=np.int32).tobytes()) % 1000)


@dataclass
class DeviceSlot:
    epoch: int
    length: int = 0
    last_token: int = -1
    done: bool = True
    ignore_eos: bool = False
    min_length: int = 0
    max_length: int = 0
    stop_ids: frozenset[int] = frozenset()
    pages: dict[int, int] = field(default_factory=dict)
    fails: bool = False  # its next row is not finite
    wants_logprobs: bool = False


class Device:
    """`pool`: the scheduler's books, which must allow each page that a row reads or writes."""

    def __init__(self, limits: Limits, pool: PagePool | None = None, model: Callable[[list[int], int], int] = next_token) -> None:
        self.limits, self.pool, self.model = limits, pool, model
        self.slots = [DeviceSlot(epoch=0) for _ in range(limits.slots)]
        self.cache = np.full((limits.pages, limits.page_size), -1)
        self.last_plan = {NO_FLAGS: -1, PlanFlag.JUMP: -1}  # in order, each of both kinds
        self.clock_us = 0

    def run(self, plan: Plan) -> StepResult:
        check(plan, self.limits)
        assert plan.plan_id > self.last_plan[plan.flags]
        self.last_plan[plan.flags] = plan.plan_id
        for slot in plan.release_slots.tolist():
            self.slots[slot].done = True
        for record in plan.admissions:
            self._admit(record)
        for slot, index, page in zip(plan.grant_slots.tolist(), plan.grant_indexes.tolist(), plan.grant_pages.tolist(), strict=True):
            assert self.slots[slot].pages.setdefault(index, page) == page, f"entry {index} of slot {slot} is remapped"
        self.records = [NO_LOGPROBS]
        ids = [[self._decode(row, slot) for row, slot in enumerate(plan.decode_slots.tolist())] for _ in range(plan.iterations)]
        ends = np.cumsum(plan.prefill_lengths)
        for row, slot in enumerate(plan.prefill_slots.tolist()):
            chunk = plan.prefill_ids[ends[row] - plan.prefill_lengths[row] : ends[row]]
            ids[0].append(self._prefill(len(plan.decode_slots) + row, slot, int(plan.prefill_starts[row]), chunk, plan.prefill_flags[row]))
        step_us = 100 + 10 * len(plan.prefill_ids)
        self.clock_us += step_us
        epochs = [self.slots[slot].epoch for slot in plan.row_slots.tolist()]
        return StepResult(
            plan_id=plan.plan_id,
            ids=np.array(ids, dtype=np.int32),
            slot_epochs=np.array(epochs, dtype=np.int32),
            hold_us=step_us,
            start_us=self.clock_us - step_us,
            end_us=self.clock_us,
            idle_us=0,
            logprobs=np.concatenate(self.records),
        )

    def _admit(self, record: np.void) -> None:
        slot = int(record["slot"])
        assert int(record["epoch"]) > self.slots[slot].epoch
        self.slots[slot] = DeviceSlot(
            epoch=int(record["epoch"]),
            done=False,
            ignore_eos=bool(record["flags"] & SlotFlag.IGNORE_EOS),
            min_length=int(record["min_length"]),
            max_length=int(record["max_length"]),
            stop_ids=frozenset(record["stop_ids"].tolist()),
            wants_logprobs=bool(record["flags"] & SlotFlag.LOGPROBS),
        )

    def _decode(self, row: int, slot: int) -> int:
        state = self.slots[slot]
        if state.done:
            return NO_TOKEN
        assert state.length < state.max_length
        self._write(slot, state.length, state.last_token)
        state.length += 1
        return self._sample(row, slot)

    def _prefill(self, row: int, slot: int, start: int, ids: Int32s, flags: int) -> int:
        state = self.slots[slot]
        if state.done:  # released before its prefill was over
            return NO_TOKEN
        assert state.length in (0, start)  # what comes before was in the cache
        state.length = start
        for token in ids.tolist():
            if flags & RowFlag.SCORE and state.length:
                self._score(row, slot, token)
            self._write(slot, state.length, token)
            state.length += 1
        return self._sample(row, slot) if flags & RowFlag.SAMPLE or state.fails else NO_TOKEN

    def _score(self, row: int, slot: int, token: int) -> None:
        """The log-probability is a function of what was read, and the likeliest id is the token."""
        ids = [self._read(slot, position) for position in range(self.slots[slot].length)]
        record = np.zeros(1, dtype=LOGPROB)
        record["row"], record["position"], record["logprob"], record["top_ids"] = row, len(ids), logprob(ids, token), token
        self.records.append(record)

    def _sample(self, row: int, slot: int) -> int:
        state = self.slots[slot]
        token = self.model([self._read(slot, position) for position in range(state.length)], self.limits.vocab_size)
        if token == FAIL or state.fails:
            state.done = True
            return FAIL
        ends = token in state.stop_ids or (token == EOS and not state.ignore_eos)
        if state.wants_logprobs:
            self._score(row, slot, token)
        state.last_token = token
        state.done = (ends and state.length + 1 > state.min_length) or state.length + 1 >= state.max_length
        return token

    def _page(self, slot: int, position: int, writes: bool) -> tuple[int, int]:
        index, offset = divmod(position, self.limits.page_size)
        page = self.slots[slot].pages.get(index, SCRATCH_PAGE)
        assert page != SCRATCH_PAGE, f"slot {slot} has no page for position {position}"
        if self.pool is not None:
            state, owner = PageState(self.pool.state[page]), self.pool.owner[page]
            others = {PageState.COOLING} if writes else {PageState.COOLING, PageState.CACHED, PageState.PENDING}
            allowed = state in others or (state in (PageState.OWNED, PageState.PENDING) and owner == slot)
            assert allowed, f"slot {slot} {'writes' if writes else 'reads'} page {page}, which is {state.name} of {owner}"
        return page, offset

    def _write(self, slot: int, position: int, token: int) -> None:
        self.cache[self._page(slot, position, writes=True)] = token

    def _read(self, slot: int, position: int) -> int:
        return int(self.cache[self._page(slot, position, writes=False)])
