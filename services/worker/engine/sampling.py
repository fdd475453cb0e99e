"""From hidden states to tokens, with the vocabulary spread over the ranks: every rank comes to the same tokens.

B rows, D hidden size, V vocabulary, L this rank's columns of it, R ranks, C candidates.
"""

import logging
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from kernels.noise import GREEDY_BELOW
from kernels.offering_head import Noise, Scores
from kernels.offers import NAN, SIGN, best_offer, ids_of, keys_of, offer, scores_of
from kernels.sampling import greedy, kept, sample
from services.worker.distributed.board import Mark
from services.worker.distributed.communicator import Communicator
from services.worker.engine.features import Feature
from services.worker.engine.logprobs import LogprobTensors, of_all, of_columns
from services.worker.layers.vocabulary import VocabularyTable

logger = logging.getLogger(__name__)

ASKING = ~Feature.SAMPLING  # features of which any may change logits, or needs them
CANDIDATES = 64  # that each rank offers for a row with top-k: 2 KB a row with four ranks, where all of 150,000 logits are 600


@dataclass(frozen=True)
class Sampling:
    """How rows are sampled; see `kernels.sampling.sample`."""

    temperature: Tensor  # [B] float32
    top_k: Tensor  # [B] int32
    top_p: Tensor  # [B] float32
    min_p: Tensor  # [B] float32
    seeds: Tensor  # [B] int64
    positions: Tensor  # [B] int32
    asks: Tensor  # [B] int32: not 0 for a row that asks for more than a temperature, which is chosen from its logits

    def __getitem__(self, rows: Tensor) -> "Sampling":
        return Sampling(*(each[rows] for each in (*self.tensors, self.asks)))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.positions

    @property
    def noise(self) -> Noise:
        return self.temperature, self.seeds, self.positions


class Sampler(Protocol):
    first: int  # the vocabulary id of the first column of logits that may be changed
    columns: int  # of these
    apart: bool  # whether rows that ask for no more than a temperature are chosen for less, if no other row does

    def score(self, x: Tensor, sampling: Sampling | None, features: Feature) -> Scores:
        """Hidden states `[B, D]` -> what `choose` wants. sampling: None if no row asks for anything.

        With features of ASKING there are the logits of the rows that ask for more than a temperature; with LOGPROBS of all rows.
        """

    def choose(self, scores: Scores, sampling: Sampling | None) -> Tensor:
        """Tokens `[B]` int32, the same on every rank; -2 for a row with a NaN. None: all rows are greedy."""

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states `[B, D]` -> what `logprobs` wants, float32."""

    def logprobs(self, logits: Tensor, chosen: Tensor) -> LogprobTensors:
        """Of the ids chosen `[B]` int32, the same on every rank; from logits that nothing has changed."""


class FullSampler:
    """Every rank gathers all logits, and chooses for itself: `4 * V / R` bytes a row from each. A rank alone takes offers where its head
    makes them."""

    first = 0

    def __init__(self, head: VocabularyTable) -> None:
        self._head = head
        self.columns = head.vocab_size
        self._offering = self.apart = head.group.size == 1 and head.makes_offers()

    def score(self, x: Tensor, sampling: Sampling | None, features: Feature) -> Scores:
        scores = _offers(self._head, x, sampling, features) if self._offering else None
        return scores or Scores(self.logits(x))

    def choose(self, scores: Scores, sampling: Sampling | None) -> Tensor:
        if scores.logits is None:
            return best_offer(scores.wanted_offers)
        return greedy(scores.logits) if sampling is None else sample(scores.logits, *sampling.tensors, offers=scores.offers)

    def logits(self, x: Tensor) -> Tensor:
        """`[B, V]`."""
        return self._head.logits(x)

    def logprobs(self, logits: Tensor, chosen: Tensor) -> LogprobTensors:
        return of_all(logits, chosen)


class BestSampler(FullSampler):
    """Every rank offers its best for each row, in 8 bytes, unless a row of the step asks for more than a temperature: then all logits
    are gathered. The noise belongs to the vocabulary id, so the best of the offers is the best of all."""

    def __init__(self, head: VocabularyTable) -> None:
        super().__init__(head)
        self._group = head.group
        self._offering, self.apart = head.makes_offers(), True

    def score(self, x: Tensor, sampling: Sampling | None, features: Feature) -> Scores:
        scores = _offers(self._head, x, sampling, features) if self._offering else None
        logits, offers = scores or Scores(self.logits(x))
        if offers is not None:
            offers = self._group.all_gather(offers.amax(dim=1, keepdim=True))
        if logits is not None and features & ASKING:
            logits = self._group.all_gather(logits)[:, : self.columns]
        return Scores(logits, offers)

    def choose(self, scores: Scores, sampling: Sampling | None) -> Tensor:
        if scores.logits is None or scores.logits.shape[1] == self.columns:
            return super().choose(scores, sampling)
        return _best(scores.logits, self._head.first, sampling, self._group)

    def logits(self, x: Tensor) -> Tensor:
        """`[B, L]`: this rank's columns, -inf where they are padding."""
        return self._head.local_logits(x)

    def logprobs(self, logits: Tensor, chosen: Tensor) -> LogprobTensors:
        if logits.shape[1] == self.columns:
            return of_all(logits, chosen)
        return of_columns(logits, chosen, self._head.first, self._group)


class CandidateSampler:
    """Every rank offers its best: one candidate of 8 bytes for a row without filters, CANDIDATES for one with a top-k up to that.

    The noise belongs to the vocabulary id, so the best of the offers is the best of all. Other rows (top-p or min-p without
    such a top-k) are gathered whole, and counted. How a row is chosen depends on its own parameters only.
    """

    def __init__(self, head: VocabularyTable, mark: Mark) -> None:
        self._head, self._group, self._mark = head, head.group, mark
        self.first, self.columns, self.apart = head.first, len(head.weight), False
        self._told = False

    def score(self, x: Tensor, sampling: Sampling | None, features: Feature) -> Scores:
        return Scores(self.logits(x))

    def logits(self, x: Tensor) -> Tensor:
        """`[B, L]`: this rank's columns, -inf where they are padding."""
        return self._head.local_logits(x)

    def choose(self, scores: Scores, sampling: Sampling | None) -> Tensor:
        logits = scores.wanted_logits
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
        """Filters do not count."""
        if sampling is not None:
            zeros, ones = torch.zeros_like(sampling.top_k), torch.ones_like(sampling.top_p)
            sampling = replace(sampling, top_k=zeros, top_p=ones, min_p=ones - 1)
        return _best(logits, self.first, sampling, self._group)

    def _ranked(self, logits: Tensor, sampling: Sampling) -> Tensor:
        ids = torch.arange(self.first, self.first + logits.shape[1], device=logits.device)
        keys = keys_of(logits, ids).masked_fill_(logits.isnan(), NAN.value)
        offers = self._group.all_gather(keys.topk(min(CANDIDATES, logits.shape[1])).values)
        best = offers.topk(min(CANDIDATES, offers.shape[1])).values  # [B, C], by (logit descending, id ascending)
        ids, values = ids_of(best), _values(best)
        dropped = ~kept(values, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        scores = scores_of(values, ids, sampling.temperature, sampling.seeds, sampling.positions)
        keys = keys_of(scores.masked_fill_(dropped, -torch.inf), ids)
        return best_offer(keys.masked_fill_(best == NAN.value, NAN.value))

    def _gathered(self, logits: Tensor, sampling: Sampling) -> Tensor:
        self._mark.count_gathered(len(logits))
        if not self._told:
            self._told = True
            logger.info("top-p or min-p without a top-k of 1 to %d: such rows gather all logits (told once)", CANDIDATES)
        return sample(self._group.all_gather(logits)[:, : self._head.vocab_size], *sampling.tensors)


def sampler_of(kind: Literal["full", "best", "candidates"], head: VocabularyTable, mark: Mark) -> Sampler:
    """The same tokens from each."""
    if kind == "candidates":
        return CandidateSampler(head, mark)
    return BestSampler(head) if kind == "best" and head.group.size > 1 else FullSampler(head)


def _offers(head: VocabularyTable, x: Tensor, sampling: Sampling | None, features: Feature) -> Scores | None:
    """Of this rank's columns; None for numbers of rows of which the head makes none."""
    noise = None if sampling is None else sampling.noise
    asks = sampling.asks if sampling is not None and features & ASKING else None
    return head.offers(x, noise, asks, Feature.LOGPROBS in features)


def _best(logits: Tensor, first: int, sampling: Sampling | None, group: Communicator) -> Tensor:
    """Of all ranks' columns `[B, L]`, here those from `first` on, for rows without filters."""
    if sampling is None:
        columns = greedy(logits)
        offers = offer(logits, (columns + first).where(columns >= 0, columns), first)
    else:
        ids = sample(logits, *sampling.tensors, first)
        offers = offer(logits, ids, first, sampling.temperature, sampling.seeds, sampling.positions)
    return best_offer(group.all_gather(offers[:, None]))


def _values(keys: Tensor) -> Tensor:
    bits = (keys >> 32).int()
    return bits.where(bits >= 0, bits ^ SIGN.value).view(torch.float32)
