"""The decoder that all families share. T tokens, D hidden size, B rows, V vocabulary."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from services.worker.distributed.communicator import Communicator
from services.worker.engine.batch import Batch
from services.worker.kvcache import LayerCache
from services.worker.layers.attention import Attention
from services.worker.layers.mlp import MLP
from services.worker.layers.norm import RMSNorm
from services.worker.layers.rotary import rotary_table
from services.worker.layers.vocabulary import VocabularyTable
from services.worker.models.config import HFConfig, ModelConfig
from services.worker.weights.shards import Shard


class DecoderLayer(nn.Module):
    def __init__(self, attention: Attention, mlp: MLP, config: ModelConfig) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = attention
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = mlp

    def forward(self, x: Tensor, residual: Tensor, batch: Batch, cache: LayerCache, table: Tensor) -> Tensor:
        """x `[T, D]` the layer before's output, not yet added to residual `[T, D]`, which is updated in place -> this layer's."""
        x = self.attention(self.input_norm.add(x, residual), batch, cache, table)
        output: Tensor = self.mlp(self.post_norm.add(x, residual))
        return output

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield from self.input_norm.shards(f"{prefix}input_layernorm.weight")
        yield from self.attention.shards(f"{prefix}self_attn.")
        yield from self.post_norm.shards(f"{prefix}post_attention_layernorm.weight")
        yield from self.mlp.shards(f"{prefix}mlp.")


class Decoder(nn.Module):
    """Token ids to logits. A family is a subclass that reads its config and, where it differs, builds other layers."""

    def __init__(self, config: ModelConfig, group: Communicator, max_length: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = VocabularyTable(config.vocab_size, config.hidden_size, group)
        self.layers = nn.ModuleList(
            DecoderLayer(Attention(config, group), MLP(config.hidden_size, config.intermediate_size, group), config)
            for _ in range(config.layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        tied = config.tied_embeddings
        self.head = self.embedding if tied else VocabularyTable(config.vocab_size, config.hidden_size, group)
        self.register_buffer("table", rotary_table(config.rope, max_length), persistent=False)

    @classmethod
    @abstractmethod
    def config_from_hf(cls, hf: HFConfig) -> ModelConfig:
        """The shape that a config.json describes. Raises ConfigError for what the family does not support."""

    def forward(self, batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
        """Logits `[B, V]` float32 of each row's last token."""
        x = self.embedding.embed(batch.ids)
        residual = torch.zeros_like(x)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, residual, batch, cache, self.table)
        last = batch.last_tokens
        return self.head.logits(self.norm.add(x[last], residual[last]))

    def shards(self) -> Iterator[Shard]:
        """What to load, in the layout that transformers writes."""
        yield from self.embedding.shards("model.embed_tokens.weight")
        for index, layer in enumerate(self.layers):
            yield from layer.shards(f"model.layers.{index}.")  # type: ignore[operator]
        yield from self.norm.shards("model.norm.weight")
        if not self.config.tied_embeddings:
            yield from self.head.shards("lm_head.weight")
