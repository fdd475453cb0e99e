"""From hidden states to tokens, with the vocabulary spread over the ranks: every rank comes to the same tokens.

B rows, D hidden size, V vocabulary, L this rank's columns of it, R ranks, C candidates.
"""

import logging
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.noise import gumbel
from kernels.sampling import FAILED, GREEDY_BELOW, greedy, kept, sample
from services.worker.distributed.board import Mark
from services.worker.engine.logprobs import LogprobTensors, of_all, of_columns
from services.worker.layers.vocabulary import VocabularyTable

logger = logging.getLogger(__name__)

CANDIDATES = 64  # that each rank offers for a row with top-k: 2 KB a row with four ranks, where all of 150,000 logits are 600
_LOW = 2**32 - 1
_NAN = 2**63 - 1  # the key of a row that is to fail: no other is larger


@dataclass(frozen=True)
class Sampling:
    """How rows are sampled; see `kernels.sampling.sample`."""

    temperature: Tensor  # [B] float32
    top_k: Tensor  # [B] int32
    top_p: Tensor  # [B] float32
    min_p: Tensor  # [B] float32
    seeds: Tensor  # [B] int64
    positions: Tensor  # [B] int32

    def __getitem__(self, rows: Tensor) -> "Sampling":
        return Sampling(*(each[rows] for each in self.tensors))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.positions


class Sampler(Protocol):
    first: int  # the vocabulary id of the logits' first column
    columns: int  # of the logits

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states `[B, D]` -> the logits that `choose` wants, float32."""

    def choose(self, logits: Tensor, sampling: Sampling | None) -> Tensor:
        """Tokens `[B]` int32, the same on every rank; -2 for a row with a NaN. None: all rows are greedy."""

    def logprobs(self, logits: Tensor, chosen: Tensor) -> LogprobTensors:
        """Of the ids chosen `[B]` int32, the same on every rank; from logits that nothing has changed."""


class FullSampler:
    """Every rank gathers all logits, and chooses for itself: `4 * V / R` bytes a row from each."""

    first = 0

    def __init__(self, head: VocabularyTable) -> None:
        self._head = head
        self.columns = head.vocab_size

    def logits(self, x: Tensor) -> Tensor:
        """`[B, V]`."""
        return self._head.logits(x)

    def choose(self, logits: Tensor, sampling: Sampling | None) -> Tensor:
        return greedy(logits) if sampling is None else sample(logits, *sampling.tensors)

    def logprobs(self, logits: Tensor, chosen: Tensor) -> LogprobTensors:
        return of_all(logits, chosen)


class CandidateSampler:
    """Every rank offers its best: one candidate of 8 bytes for a row without filters, CANDIDATES for one with a top-k up to that.

    The noise belongs to the vocabulary id, so the best of the offers is the best of all. Other rows (top-p or min-p without
    such a top-k) are gathered whole, and counted. How a row is chosen depends on its own parameters only.
    """

    def __init__(self, head: VocabularyTable, mark: Mark) -> None:
        self._head, self._group, self._mark = head, head.group, mark
        self.first, self.columns = head.first, len(head.weight)
        self._told = False

    def logits(self, x: Tensor) -> Tensor:
        """`[B, L]`: this rank's columns, -inf where they are padding."""
        return self._head.local_logits(x)

    def choose(self, logits: Tensor, sampling: Sampling | None) -> Tensor:
        if sampling is None:
            return self._best(logits, None)
        top_k, vocab_size = sampling.top_k, self._head.vocab_size
        random = sampling.temperature >= GREEDY_BELOW.value
        filtered = random & (((top_k > 0) & (top_k < vocab_size)) | (sampling.top_p < 1) | (sampling.min_p > 0))
        ranked = filtered & (top_k > 0) & (top_k <= CANDIDATES)
        tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        for rows, method in ((~filtered, self._best), (ranked, self._ranked), (filtered & ~ranked, self._gathered)):
            index = rows.nonzero().flatten()
            if len(index):
                tokens[index] = method(logits[index], sampling[index])
        return tokens

    def logprobs(self, logits: Tensor, chosen: Tensor) -> LogprobTensors:
        return of_columns(logits, chosen, self.first, self._group)

    def _best(self, logits: Tensor, sampling: Sampling | None) -> Tensor:
        if sampling is None:
            columns = greedy(logits)
            ids = (columns + self.first).where(columns != FAILED.value, FAILED.value)
        else:
            zeros, ones = torch.zeros_like(sampling.top_k), torch.ones_like(sampling.top_p)
            ids = sample(logits, sampling.temperature, zeros, ones, ones - 1, sampling.seeds, sampling.positions, self.first)
        own = logits.gather(1, (ids - self.first).clamp_(min=0).long()[:, None])
        scores = own if sampling is None else _scores(own, ids[:, None], sampling)
        keys = _keys(scores, ids[:, None]).masked_fill_((ids == FAILED.value)[:, None], _NAN)
        return _winner(self._group.all_gather(keys))

    def _ranked(self, logits: Tensor, sampling: Sampling) -> Tensor:
        ids = torch.arange(self.first, self.first + logits.shape[1], device=logits.device)
        keys = _keys(logits, ids).masked_fill_(logits.isnan(), _NAN)
        offers = self._group.all_gather(keys.topk(min(CANDIDATES, logits.shape[1])).values)
        best = offers.topk(min(CANDIDATES, offers.shape[1])).values  # [B, C], by (logit descending, id ascending)
        ids, values = _ids(best), _values(best)
        dropped = ~kept(values, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        keys = _keys(_scores(values, ids, sampling).masked_fill_(dropped, -torch.inf), ids)
        return _winner(keys.masked_fill_(best == _NAN, _NAN))

    def _gathered(self, logits: Tensor, sampling: Sampling) -> Tensor:
        self._mark.count_gathered(len(logits))
        if not self._told:
            self._told = True
            logger.info("top-p or min-p without a top-k of 1 to %d: such rows gather all logits (told once)", CANDIDATES)
        return sample(self._group.all_gather(logits)[:, : self._head.vocab_size], *sampling.tensors)


def _scores(logits: Tensor, ids: Tensor, sampling: Sampling) -> Tensor:
    """What `sample` compares, of columns whose ids differ by row: logits and ids `[B, C]` -> `[B, C]`."""
    random = sampling.temperature >= GREEDY_BELOW.value
    noisy = logits / sampling.temperature.where(random, 1.0)[:, None] + gumbel(sampling.seeds, sampling.positions, ids)
    return noisy.where(random[:, None], logits)


def _keys(scores: Tensor, ids: Tensor) -> Tensor:
    """int64 in the order of (score ascending, id descending), so that the largest is the one to choose."""
    bits = (scores + 0.0).view(torch.int32)  # -0 and 0 are equal
    ordered = bits.where(bits >= 0, bits ^ 0x7FFFFFFF).long()
    return (ordered << 32) | (_LOW - ids.long())


def _values(keys: Tensor) -> Tensor:
    bits = (keys >> 32).int()
    return bits.where(bits >= 0, bits ^ 0x7FFFFFFF).view(torch.float32)


def _ids(keys: Tensor) -> Tensor:
    return (_LOW - (keys & _LOW)).int()


def _winner(keys: Tensor) -> Tensor:
    """keys `[B, C]` -> ids `[B]` int32."""
    largest = keys.amax(dim=1)
    return _ids(largest).masked_fill_(largest == _NAN, FAILED.value)
