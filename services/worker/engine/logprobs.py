"""Log-probabilities of tokens, from the logits to the records that leave the worker.

They are the model's own: before temperature, penalties, biases and filters, so they depend on the sequence only. A row of a table
holds a token's in int32, floats by their bits, so that one copy brings ids and log-probabilities to the host.

B rows, D hidden size, L columns of logits, K = MAX_TOP_LOGPROBS, R ranks.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.logprobs import NO_ID, logprobs
from services.worker.distributed.communicator import Communicator
from shared.protocol.logprobs import LOGPROB, MAX_TOP_LOGPROBS, NO_TOP_ID, Logprobs
from shared.protocol.plan import Int32s

K = MAX_TOP_LOGPROBS
COLUMNS = LOGPROB.itemsize // 4  # of a table; the first holds the id of a token sampled, or the plan's row of a prompt token scored
SCORED_AT_ONCE = 256  # tokens of a prompt: 160 MB of logits with a vocabulary of 152,000
assert NO_ID == NO_TOP_ID


class Scorer(Protocol):
    """What scoring asks of a sampler."""

    def logits(self, x: Tensor) -> Tensor: ...

    def logprobs(self, logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...


def of_all(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits `[B, V]`, chosen `[B]` int32 -> the chosen ids' log-probabilities `[B]`, the likeliest ids `[B, K]` int32 and theirs."""
    total, chosen_logits, top_ids, top_logits = logprobs(logits, chosen, K)
    return chosen_logits - total, top_ids, top_logits - total[:, None]


def of_columns(logits: Tensor, chosen: Tensor, first: int, group: Communicator) -> tuple[Tensor, Tensor, Tensor]:
    """The same from each rank's columns `[B, L]`, the ids from `first` on: `8 + 8 * K` bytes a row from each."""
    total, chosen_logits, top_ids, top_logits = logprobs(logits, chosen, K, first)
    part = torch.cat((total[:, None].view(torch.int32), chosen_logits[:, None].view(torch.int32), top_ids, top_logits.view(torch.int32)), 1)
    parts = group.all_gather(part).view(len(logits), group.size, 2 + 2 * K)
    total = parts[:, :, 0].contiguous().view(torch.float32).logsumexp(dim=1)
    chosen_logits = parts[:, :, 1].contiguous().view(torch.float32).amax(dim=1)
    # Ranks come in the order of their ids, and a stable sort leaves equals in order.
    values, order = parts[:, :, 2 + K :].flatten(1).view(torch.float32).sort(dim=1, descending=True, stable=True)
    values, top_ids = values[:, :K], parts[:, :, 2 : 2 + K].flatten(1).gather(1, order)[:, :K]
    return chosen_logits - total, top_ids.where(values > -torch.inf, NO_ID), values - total[:, None]  # padding is no id


def table(first: Tensor, positions: Tensor, values: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """first, positions `[B]` int32 -> `[B, COLUMNS]` int32, in the layout of LOGPROB but for the first column."""
    logprob, top_ids, top_logprobs = values
    return torch.cat(
        (first[:, None], positions[:, None], logprob[:, None].view(torch.int32), top_ids, top_logprobs.contiguous().view(torch.int32)), 1
    )


def records(result: Int32s, wanted: NDArray[np.bool_]) -> Logprobs:
    """Of the rows `[B]` of a table that are wanted and have yielded a token."""
    rows = np.flatnonzero(wanted & (result[:, 0] >= 0)).astype(np.int32)
    chosen = np.ascontiguousarray(result[rows])
    chosen[:, 0] = rows
    return chosen.view(LOGPROB)[:, 0]


class PromptScores:
    """Scores prompts a chunk at a time. The log-probability of a chunk's first id comes of the chunk before, whose last hidden state
    is kept for that, by slot."""

    def __init__(self, slots: int, scorer: Scorer) -> None:
        self._scorer = scorer
        self._slots = slots
        self._carried: Tensor | None = None  # [S, D], once somebody asks

    def score(self, row: int, slot: int, start: int, ids: Tensor, hidden: Tensor) -> Iterator[Tensor]:
        """ids `[n]` int32 of the chunk of a plan's row, from position `start` on, hidden `[n, D]` of the same tokens -> tables."""
        if self._carried is None:
            self._carried = hidden.new_zeros(self._slots, hidden.shape[1])
        before = torch.cat((self._carried[slot : slot + 1], hidden[:-1]))  # what each id was predicted from
        self._carried[slot] = hidden[-1]
        for at in range(0 if start else 1, len(ids), SCORED_AT_ONCE):
            part = ids[at : at + SCORED_AT_ONCE]
            values = self._scorer.logprobs(self._scorer.logits(before[at : at + len(part)]), part)
            positions = torch.arange(start + at, start + at + len(part), dtype=torch.int32, device=ids.device)
            yield table(torch.full_like(part, row), positions, values)
