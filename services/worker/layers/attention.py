"""Attention of one layer over the paged KV cache. T tokens, D hidden size, Q and K heads of this rank, H head size."""

from collections.abc import Iterator

from torch import Tensor, nn

from kernels.rope import rope_and_store
from services.worker.attention.paged import paged_attention
from services.worker.distributed.communicator import Communicator
from services.worker.engine.batch import Batch
from services.worker.kvcache import LayerCache
from services.worker.layers.linear import RowLinear, qkv_linear, rows, share
from services.worker.models.config import ModelConfig
from services.worker.weights.shards import Shard


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, group: Communicator) -> None:
        super().__init__()
        self.head_dim, self.scale = config.head_dim, config.scale
        self.qkv = qkv_linear(config.hidden_size, config.head_dim, config.q_heads, config.kv_heads, group)
        own = rows(share(config.q_heads, group, "query heads"), config.head_dim)
        self.output = RowLinear("o_proj", config.q_heads * config.head_dim, own, config.hidden_size, group)
        self.counts = [size // config.head_dim for size in self.qkv.sizes]

    def forward(self, x: Tensor, batch: Batch, cache: LayerCache, table: Tensor) -> Tensor:
        """x `[T, D]` -> `[T, D]`; writes the tokens' keys and values to the cache."""
        q, k, v = self.qkv(x).view(len(x), -1, self.head_dim).split(self.counts, dim=1)
        q = rope_and_store(q, k, v, batch.positions, table, batch.locations, cache.k, cache.v)
        output: Tensor = self.output(paged_attention(q, cache, batch, self.scale).flatten(1))
        return output

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from self.qkv.shards(prefix)
        yield from self.output.shards(prefix)
