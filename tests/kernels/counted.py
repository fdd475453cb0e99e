"""What the tests of counts and of penalties share: sequences that are counted as an engine does."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.counts import Held, count_torch, count_triton, recount_torch, recount_triton
from kernels.penalties import penalise_torch, penalise_triton
from tests.kernels.support import DEVICE, implementations

SLOTS = 6
PAGE = 16


@dataclass(frozen=True)
class Operations:
    penalise: Callable[..., None]
    count: Callable[..., None]
    recount: Callable[..., None]

    @property
    def lists(self) -> bool:
        """Whether they keep the lists."""
        return self.recount is recount_triton


IMPLEMENTATIONS = [
    Operations(*each)
    for each in zip(
        implementations(penalise_torch, penalise_triton),
        implementations(count_torch, count_triton),
        implementations(recount_torch, recount_triton),
        strict=True,
    )
]


def int32s(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def bools(*values: bool) -> Tensor:
    return torch.tensor(values, dtype=torch.bool, device=DEVICE)


def zeros(slots: int, columns: int, tokens: int = 1000) -> Held:
    held = Held.nothing(slots, columns, tokens, DEVICE)
    held.counts.zero_()
    return held


def recount_of(operations: Operations, held: Held, slot: int, prompt: list[int], output: list[int], first: int = 0) -> None:
    """As when a prefill of the slot ends."""
    ids = int32s(*prompt, *output)
    pages = -(-len(ids) // PAGE) or 1
    token_ids = torch.full((pages * PAGE,), -7, dtype=torch.int32, device=DEVICE)
    token_ids[: len(ids)] = ids
    page_table = torch.arange(pages, dtype=torch.int32, device=DEVICE).repeat(len(held.counts), 1)
    counted, prompt_length = torch.ones_like(held.distinct, dtype=torch.bool), torch.full_like(held.distinct, len(prompt))
    slots, lengths = int32s(slot), int32s(len(ids))
    operations.recount(held, counted, slots, lengths, bools(True), prompt_length, token_ids, page_table, PAGE, first)


def count_of(operations: Operations, held: Held, slot: int, ids: list[int], first: int = 0) -> None:
    counted = torch.ones_like(held.distinct, dtype=torch.bool)
    operations.count(held, counted, int32s(*[slot] * len(ids)), int32s(*ids), first)


def check_lists(operations: Operations, held: Held, *slots: int) -> None:
    """Each column that is counted is listed once, and no other."""
    if operations.lists:
        for slot in slots:
            listed = held.listed[slot, : int(held.distinct[slot])].tolist()
            assert sorted(listed) == held.counts[slot].nonzero().flatten().tolist(), f"slot {slot}"
