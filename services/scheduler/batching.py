"""What goes into one step: every decode row that may run, then prefill chunks, first come first served, within a budget of tokens.

Long prompts are cut into chunks, so that they never stall running streams; a share of the budget is the prompts', so that many
running streams never stall them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from services.scheduler.slots import Slots
from shared.protocol.plan import Int32s

PREFILL_SHARE = 4  # a quarter of the budget, when decode rows alone would fill it


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a slot's prefill."""

    slot: int
    start: int
    length: int
    last: bool


def decode_rows(slots: Slots, budget: int, prefill_waits: bool) -> Int32s:
    """The slots of this step's decode rows; when not all fit, those that have waited longest."""
    rows = slots.may_decode()
    most = budget - max(budget // PREFILL_SHARE, 1) if prefill_waits else budget
    if len(rows) <= most:
        return rows
    return np.sort(rows[np.argsort(slots.last_plan[rows], kind="stable")[:most]])


def prefill_chunks(slots: Slots, candidates: Iterator[int], budget: int) -> list[Chunk]:
    """One chunk for each of `candidates`, slots in state PREFILL, from which no more are drawn than the budget feeds."""
    chunks = []
    while budget > 0 and (slot := next(candidates, None)) is not None:
        start, target = int(slots.planned[slot]), int(slots.target[slot])
        length = min(target - start, budget)
        chunks.append(Chunk(slot, start, length, last=start + length == target))
        budget -= length
    return chunks
