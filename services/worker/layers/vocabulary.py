"""Embedding and LM head, each rank with its range of the vocabulary. T tokens, B rows, D hidden size, V vocabulary."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.embedding import embedding
from services.worker.distributed.communicator import Communicator
from services.worker.layers.linear import ALL
from services.worker.weights.shards import Shard


class VocabularyTable(nn.Module):
    """`weight` `[V_local, D]`: V padded to a multiple of the ranks; rows past V are zeros and never chosen."""

    def __init__(self, vocab_size: int, hidden_size: int, group: Communicator) -> None:
        super().__init__()
        self.vocab_size, self.group = vocab_size, group
        local = -(-vocab_size // group.size)
        self.first = group.rank * local
        self.real = max(0, min(local, vocab_size - self.first))  # rows of this rank that are no padding
        self.weight = nn.Parameter(torch.zeros(local, hidden_size), requires_grad=False)

    def embed(self, ids: Tensor) -> Tensor:
        """ids `[T]` -> `[T, D]`, the same on every rank."""
        return self.group.all_reduce(embedding(ids, self.weight, self.first))

    def logits(self, x: Tensor) -> Tensor:
        """x `[B, D]` -> `[B, V]` float32, the same on every rank."""
        return self.group.all_gather(F.linear(x, self.weight).float())[:, : self.vocab_size]

    def shards(self, name: str) -> Iterator[Shard]:
        own = slice(self.first, self.first + self.real)
        if self.real:
            yield Shard(name, (self.vocab_size, self.weight.shape[1]), (own, ALL), self.weight[: self.real])
