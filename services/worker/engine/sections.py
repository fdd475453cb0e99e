"""A plan's sections on the device: see `shared.protocol.plan`."""

import torch
from torch import Tensor

from shared.protocol.plan import ADMISSION_SIZE, HEADER_SIZE, SECTIONS, Plan, RowFlag

Sections = dict[str, Tensor]  # int32, by the plan's own names


def sections_of(plan: Plan, words: Tensor) -> Sections:
    """Views of `words`, which begin with the whole plan."""
    sections, at = {}, HEADER_SIZE
    for name, _ in SECTIONS:
        sections[name] = words[at : at + len(getattr(plan, name))]
        at += len(sections[name])
    sections["admissions"] = words[at : at + len(plan.admissions) * ADMISSION_SIZE].view(-1, ADMISSION_SIZE)
    return sections


def decode_sections(slots: Tensor) -> Sections:
    """Of a step that decodes `slots` `[B]` int32 and nothing else."""
    return row_sections(slots, *[slots[:0]] * 4)


def row_sections(decode_slots: Tensor, prefill_slots: Tensor, starts: Tensor, lengths: Tensor, ids: Tensor) -> Sections:
    """Of a step whose rows all yield a token."""
    return {
        "decode_slots": decode_slots,
        "decode_flags": torch.full_like(decode_slots, RowFlag.SAMPLE),
        "prefill_slots": prefill_slots,
        "prefill_starts": starts,
        "prefill_lengths": lengths,
        "prefill_flags": torch.full_like(prefill_slots, RowFlag.SAMPLE),
        "prefill_ids": ids,
    }


def samples(sections: Sections) -> Tensor:
    """`[B]` bool: the rows that yield a token."""
    if not len(sections["prefill_flags"]):
        return sections["decode_flags"].bool()  # a decode row always does
    flags = torch.cat((sections["decode_flags"], sections["prefill_flags"]))
    return (flags & RowFlag.SAMPLE) != 0
