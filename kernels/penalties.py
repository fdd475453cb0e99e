"""Logit bias, and penalties for the ids that a sequence holds already.

B rows, S slots, L columns of logits: the vocabulary ids from `first` on, N ids to count, M biases of a slot.
"""

import torch
from torch import Tensor

IN_PROMPT = 1 << 30  # of a count: the id is in the prompt; the bits below say how often it was generated


def penalise(
    logits: Tensor,
    slots: Tensor,
    counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    first: int = 0,
) -> None:
    """logits `[B, L]` float32, in place; slots `[B]` int32 or int64; by slot: counts `[S, L]` int32, presence, frequency and
    repetition `[S]` float32, bias_ids `[S, M]` int32 (no id twice; negative where unused), bias_values `[S, M]` float32.

    In this order: biases are added; a logit of an id that prompt or completion hold is divided by repetition, or multiplied when it is
    below 0; frequency is subtracted as often as the id was generated, and presence once if it was. A slot with presence 0, frequency 0,
    repetition 1 and no bias keeps its rows bit for bit, whatever its counts.
    """
    penalise_torch(logits, slots, counts, presence, frequency, repetition, bias_ids, bias_values, first)


def count(counts: Tensor, slots: Tensor, ids: Tensor, in_prompt: Tensor, first: int = 0) -> None:
    """counts `[S, L]` int32, in place; slots `[N]` int32 or int64, ids `[N]` int32, in_prompt `[N]` bool: of the prompt, not generated.

    A pair of slot and id may come more than once. Ids outside `[first, first + L)`, negative ones too, are not counted. Of a slot, no
    prompt ids may come after generated ones.
    """
    count_torch(counts, slots, ids, in_prompt, first)


def penalise_torch(
    logits: Tensor,
    slots: Tensor,
    counts: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    first: int = 0,
) -> None:
    slots = slots.long()
    columns = bias_ids[slots].long() - first
    inside = (columns >= 0) & (columns < logits.shape[1])
    logits.scatter_add_(1, columns.where(inside, 0), bias_values[slots].where(inside, 0.0))

    counted = counts[slots]
    generated = counted & (IN_PROMPT - 1)
    factor = repetition[slots, None]
    logits.copy_(torch.where(counted > 0, torch.where(logits > 0, logits / factor, logits * factor), logits))
    logits -= generated * frequency[slots, None] + (generated > 0) * presence[slots, None]


def count_torch(counts: Tensor, slots: Tensor, ids: Tensor, in_prompt: Tensor, first: int = 0) -> None:
    columns = ids.long() - first
    inside = (columns >= 0) & (columns < counts.shape[1])
    places = slots.long() * counts.shape[1] + columns.where(inside, 0)
    flat = counts.view(-1)
    flat.scatter_reduce_(0, places, (inside & in_prompt).int() * IN_PROMPT, "amax")
    flat.scatter_add_(0, places, (inside & ~in_prompt).int())
