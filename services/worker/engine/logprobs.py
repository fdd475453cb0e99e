"""Log-probabilities of tokens, from the logits to the records that leave the worker.

They are the model's own: before temperature, penalties, biases and filters, so they depend on the sequence only. A row of a table
holds a token's in int32, floats by their bits, so that one copy brings ids and log-probabilities to the host.

B rows, D hidden size, V vocabulary, L this rank's columns of it, K = MAX_TOP_LOGPROBS, R ranks.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.logprobs import NO_ID, logprobs
from services.worker.distributed.communicator import Communicator
from shared.protocol.logprobs import LOGPROB, MAX_TOP_LOGPROBS, NO_TOP_ID, Logprobs
from shared.protocol.plan import Int32s, Plan, RowFlag

K = MAX_TOP_LOGPROBS
COLUMNS = LOGPROB.itemsize // 4  # of a table; the first holds the id of a token sampled, or the plan's row of a prompt token scored
SCORED_AT_ONCE = 64  # tokens of a prompt: 39 MB of logits with a vocabulary of 152,000
assert NO_ID == NO_TOP_ID

# Of B ids: their log-probabilities `[B]`, the likeliest ids `[B, K]` int32 and theirs `[B, K]`.
LogprobTensors = tuple[Tensor, Tensor, Tensor]


class Scorer(Protocol):
    """What scoring asks of a sampler."""

    def logits(self, x: Tensor) -> Tensor: ...

    def logprobs(self, logits: Tensor, chosen: Tensor) -> LogprobTensors: ...


def of_all(logits: Tensor, chosen: Tensor) -> LogprobTensors:
    """logits `[B, V]`, chosen `[B]` int32."""
    total, chosen_logits, top_ids, top_logits = logprobs(logits, chosen, K)
    return chosen_logits - total, top_ids, top_logits - total[:, None]


def of_columns(logits: Tensor, chosen: Tensor, first: int, group: Communicator) -> LogprobTensors:
    """The same from each rank's columns `[B, L]`, the ids from `first` on: `8 + 8 * K` bytes a row from each."""
    total, chosen_logits, top_ids, top_logits = logprobs(logits, chosen, K, first)
    part = torch.cat((_bits(total[:, None]), _bits(chosen_logits[:, None]), top_ids, _bits(top_logits)), dim=1)
    totals, chosen_parts, ids, values = group.all_gather(part).view(len(logits), group.size, -1).split([1, 1, K, K], dim=2)
    total = _floats(totals[:, :, 0]).logsumexp(dim=1)
    # Ranks come in the order of their ids, and a stable sort leaves equals in order.
    largest, order = _floats(values.flatten(1)).sort(dim=1, descending=True, stable=True)
    largest, top_ids = largest[:, :K], ids.flatten(1).gather(1, order)[:, :K]
    top_ids = top_ids.where(largest > -torch.inf, NO_ID)  # padding is no id
    return _floats(chosen_parts[:, :, 0]).amax(dim=1) - total, top_ids, largest - total[:, None]


def table(first: Tensor, positions: Tensor, values: LogprobTensors) -> Tensor:
    """first, positions `[B]` int32 -> `[B, COLUMNS]` int32, in the layout of LOGPROB but for what the first column holds."""
    logprob, top_ids, top_logprobs = values
    return torch.cat((first[:, None], positions[:, None], _bits(logprob[:, None]), top_ids, _bits(top_logprobs)), dim=1)


def ids_of(result: Int32s) -> Int32s:
    """Of a step's result, a table `[B, COLUMNS]` or ids alone `[B]`."""
    return result if result.ndim == 1 else np.ascontiguousarray(result[:, 0])


def records_of(result: Int32s, wanted: NDArray[np.bool_], scores: Int32s | None = None) -> Logprobs:
    """Of the rows of a step's result that want them and have yielded a token, and those of the prompts that it scored."""
    records = np.empty((0, COLUMNS), dtype=np.int32)
    if result.ndim == 2:
        rows = np.flatnonzero(wanted & (result[:, 0] >= 0))
        records = result[rows]
        records[:, 0] = rows
    if scores is not None:
        records = np.concatenate((records, scores))
    return np.ascontiguousarray(records).view(LOGPROB)[:, 0]


class PromptScores:
    """Scores prompts a chunk at a time. A chunk's first id is predicted from the last hidden state of the chunk before, which is kept
    for that, by slot."""

    def __init__(self, slots: int, scorer: Scorer) -> None:
        self._scorer = scorer
        self._slots = slots
        self._carried: Tensor | None = None  # [slots, D], once somebody asks

    def score(self, plan: Plan, ids: Tensor, hidden: Tensor) -> Tensor:
        """ids `[T]` int32, the plan's prefill ids, and hidden states `[N, D]` of `scored_tokens` -> a table of as many rows at most.

        Nothing here waits for the device.
        """
        carried = self._carried
        if carried is None:
            carried = self._carried = hidden.new_zeros(self._slots, hidden.shape[1])
        tables = [ids.new_empty(0, COLUMNS)]
        at = 0
        for row, chunk in scored_chunks(plan):
            slot, start, length = int(plan.prefill_slots[row]), int(plan.prefill_starts[row]), len(chunk)
            own, at = hidden[at : at + length], at + length
            before = torch.cat((carried[slot : slot + 1], own[:-1]))  # what each id was predicted from
            carried[slot] = own[-1]
            for offset in range(0 if start else 1, length, SCORED_AT_ONCE):
                part = ids[chunk.start + offset : min(chunk.start + offset + SCORED_AT_ONCE, chunk.stop)]
                values = self._scorer.logprobs(self._scorer.logits(before[offset : offset + len(part)]), part)
                positions = torch.arange(start + offset, start + offset + len(part), dtype=torch.int32, device=ids.device)
                tables.append(table(torch.full_like(part, len(plan.decode_slots) + row), positions, values))
        return torch.cat(tables)


def scored_chunks(plan: Plan) -> list[tuple[int, range]]:
    """The prefill rows that are scored, and where their ids are among the plan's."""
    ends = np.cumsum(plan.prefill_lengths)
    rows = np.flatnonzero(plan.prefill_flags & RowFlag.SCORE).tolist()
    return [(row, range(int(ends[row] - plan.prefill_lengths[row]), int(ends[row]))) for row in rows]


def scored_tokens(plan: Plan, device: torch.device) -> Tensor | None:
    """Which of a step's tokens are scored, `[N]` int64, if any."""
    chunks = [torch.arange(chunk.start, chunk.stop, device=device) for _, chunk in scored_chunks(plan)]
    return torch.cat(chunks) + len(plan.decode_slots) if chunks else None


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def _floats(bits: Tensor) -> Tensor:
    return bits.contiguous().view(torch.float32)
