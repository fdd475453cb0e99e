"""Attention of one layer over the paged KV cache. T tokens, D hidden size, Q and K heads of this rank, H head size."""

from collections.abc import Iterator

from torch import Tensor, nn

from kernels.rms_norm import Unscaled
from kernels.rotated_attention import rotates_within
from services.worker.engine.batch import Batch
from services.worker.kvcache import LayerCache
from services.worker.layers.backends import Backends
from services.worker.layers.linear import RowLinear, qkv_linear, rows, share
from services.worker.layers.norm import RMSNorm
from services.worker.layers.rotary import Rotation
from services.worker.models.config import ModelConfig
from services.worker.weights.shards import Shard


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, window: int | None, backends: Backends) -> None:
        """window: how many positions a token attends to, its own included; None: all up to it."""
        super().__init__()
        self.head_dim, self.scale, self.window = config.head_dim, config.scale, window
        self.attend, self.rotate, self.attend_rotated = backends.attend, backends.rotate, backends.attend_rotated
        self.qkv = qkv_linear(config.hidden_size, config.head_dim, config.q_heads, config.kv_heads, config.qkv_bias, backends)
        own = rows(share(config.q_heads, backends.group, "query heads"), config.head_dim)
        self.output = RowLinear("o_proj", config.q_heads * config.head_dim, own, config.hidden_size, config.output_bias, backends)
        self.counts = [size // config.head_dim for size in self.qkv.sizes]
        self.eps = config.norm_eps
        # Over one head, so every rank needs them whole, however the heads are shared out.
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor | Unscaled, batch: Batch, cache: LayerCache, rotation: Rotation) -> Tensor:
        """x `[T, D]` -> `[T, Q * H]`, what `output` is to take; writes the tokens' keys and values to the cache."""
        qkv = self.qkv(x)
        q, k, v = qkv.view(len(qkv), -1, self.head_dim).split(self.counts, dim=1)
        q_norm, k_norm = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        places = rotation.positions, rotation.table, batch.locations, cache.k, cache.v
        norms = q_norm, k_norm, self.eps, rotation.query_scale
        if self.attend_rotated and batch.rows == batch.decode_rows and rotates_within(q, cache.k, rotation.table, batch.page_table):
            read = batch.page_table, batch.slots, batch.lengths, self.scale, self.window
            return self.attend_rotated(q, k, v, *places, *read, *norms).flatten(1)
        q = self.rotate(q, k, v, *places, *norms)
        return self.attend(q, cache, batch, self.scale, self.window).flatten(1)

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from self.qkv.shards(prefix)
        yield from self.output.shards(prefix)
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                yield from norm.shards(f"{prefix}{name}.weight")
