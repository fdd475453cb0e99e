"""What goes into one step: which decode rows, and how much of which prompts.

Long prompts are cut into chunks, so that they never stall running streams. Half of the prompts' tokens are for the prompt that has
been admitted first, the other half for the shortest ones: a short prompt does not wait behind a long one, nor a long one for ever.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from services.scheduler.slots import Rows, Slots


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a slot's prefill."""

    slot: int
    start: int
    length: int
    last: bool


Admit = Callable[[int | None], int | None]  # the slot of a request that starts now; with a number, if no more tokens are left of it


def decode_rows(slots: Slots, rows: Rows, most: int) -> Rows:
    """The slots of a step's decode rows; when more than `most` of `rows` could run, those that have waited longest."""
    if len(rows) <= most:
        return rows
    return np.sort(rows[np.argsort(slots.last_plan[rows], kind="stable")[:most]])


def prefill_chunks(slots: Slots, prefilling: Iterable[int], admit: Admit, budget: int) -> list[Chunk]:
    """At most one chunk for each slot; prefilling: those in state PREFILL, in order of admission. Admits no more than the budget feeds.

    With nobody else to feed, the first gets all. So a prompt of n tokens, once admitted, needs at most 2n / budget steps as the
    first, and the shortest prompt at most as many.
    """
    if budget <= 0:
        return []
    others = list(prefilling)
    first = others.pop(0) if others else admit(None)
    if first is None:
        return []
    lengths: dict[int, int] = {}

    def left(slot: int) -> int:
        return int(slots.target[slot] - slots.planned[slot]) - lengths.get(slot, 0)

    def feed(slot: int, most: int) -> int:
        length = min(left(slot), most)
        lengths[slot] = lengths.get(slot, 0) + length
        return length

    others.sort(key=left, reverse=True)
    budget -= feed(first, -(-budget // 2))
    while budget > 0:
        slot = admit(left(others[-1]) if others else None)
        if slot is None:
            if not others:
                break
            slot = others.pop()
        budget -= feed(slot, budget)
    if budget > 0 and left(first):
        feed(first, budget)
    return [
        Chunk(slot, int(slots.planned[slot]), length, last=int(slots.planned[slot]) + length == slots.target[slot])
        for slot, length in lengths.items()
    ]
