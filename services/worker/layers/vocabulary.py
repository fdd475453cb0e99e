"""Embedding and LM head, each rank with its range of the vocabulary. T tokens, B rows, D hidden size, V vocabulary."""

import logging
from collections.abc import Iterator
from zlib import crc32

import torch
from torch import Tensor, nn

from kernels.embedding import embedding
from kernels.offering_head import Noise, Scores, measured
from services.worker.distributed.communicator import Communicator
from services.worker.layers.backends import Backends
from services.worker.layers.linear import ALL
from services.worker.weights.shards import Shard

logger = logging.getLogger(__name__)


class VocabularyTable(nn.Module):
    """`weight` `[V_local, D]`: V padded to a multiple of the ranks; rows past V are zeros, and their logits -inf."""

    def __init__(self, vocab_size: int, hidden_size: int, backends: Backends) -> None:
        super().__init__()
        self.vocab_size, self.backends, group = vocab_size, backends, backends.group
        local = -(-vocab_size // group.size)
        self.first = group.rank * local
        self.real = max(0, min(local, vocab_size - self.first))  # rows of this rank that are no padding
        self.weight = nn.Parameter(torch.zeros(local, hidden_size), requires_grad=False)

    def embed(self, ids: Tensor) -> Tensor:
        """ids `[T]` -> `[T, D]`, this rank's part of the sum: zeros for the ids of others."""
        return embedding(ids, self.weight, self.first)

    @property
    def group(self) -> Communicator:
        return self.backends.group

    def local_logits(self, x: Tensor) -> Tensor:
        """x `[B, D]` -> `[B, V_local]` float32: of this rank's ids, -inf for its padding."""
        logits = self.backends.logits(x, self.weight)
        logits[:, self.real :] = -torch.inf
        return logits

    def makes_offers(self) -> bool:
        """Of some numbers of rows at least, on this rank and, of the same, on all others: all ranks ask together."""
        offering = {} if self.backends.offers is None else measured(self.weight.device, self.weight.dtype, *self.weight.shape)
        known = crc32(repr(sorted(offering.items())).encode())
        same = self.group.minimum(known) == -self.group.minimum(-known)
        if not same:
            logger.warning("the tables of the ranks' GPUs differ: all compute logits, which takes longer than to let the head choose")
        return same and any(offering.values())

    def offers(self, x: Tensor, noise: Noise | None, asks: Tensor | None, every: bool) -> Scores | None:
        """As of `kernels.offering_head`, of this rank's ids. None: take the logits."""
        backend = self.backends.offers
        return None if backend is None else backend(x, self.weight, self.real, self.first, noise, asks, every)

    def logits(self, x: Tensor) -> Tensor:
        """x `[B, D]` -> `[B, V]` float32, the same on every rank."""
        return self.group.all_gather(self.local_logits(x))[:, : self.vocab_size]

    def shards(self, name: str) -> Iterator[Shard]:
        first = min(self.first, self.vocab_size)
        own = slice(first, first + self.real)  # empty on a rank that holds padding only
        yield Shard(name, (self.vocab_size, self.weight.shape[1]), (own, ALL), self.weight[: self.real])
