"""The decoder that all families share. T tokens, D hidden size, B rows, V vocabulary."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from kernels.rms_norm import Unscaled
from services.worker.engine.batch import Batch
from services.worker.kvcache import LayerCache
from services.worker.layers.attention import Attention
from services.worker.layers.backends import Backends
from services.worker.layers.mlp import MLP
from services.worker.layers.moe import MoE
from services.worker.layers.norm import RMSNorm
from services.worker.layers.rotary import Rotary, Rotation
from services.worker.layers.vocabulary import VocabularyTable
from services.worker.models.config import BaseFields, ModelConfig
from services.worker.weights.shards import Shard


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, backends: Backends) -> None:
        super().__init__()
        self.group = backends.group
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, config.windows[layer], backends)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps)
        experts = config.experts
        self.mlp: MLP | MoE = (
            MoE(config.hidden_size, experts, backends)
            if experts and layer in experts.layers
            else MLP(config.hidden_size, config.intermediate_size, config.mlp_bias, backends)
        )

    def forward(
        self, x: Tensor | Unscaled, residual: Tensor, batch: Batch, cache: LayerCache, rotation: Rotation, following: Self | None
    ) -> Tensor | Unscaled:
        """x: the input norm of residual `[T, D]`, which is updated in place -> what the following layer takes; of the last layer what it
        gives, `[T, D]`, a part of a sum over the ranks, not yet added."""
        x = self.post_norm.after(self.attention(x, batch, cache, rotation), self.attention.output, residual, self.mlp.reader)
        if following is None:
            output: Tensor = self.mlp(x)
            return output
        return self.mlp.add(x, residual, following.input_norm, following.attention.qkv)

    def shards(self, prefix: str, names: Set[str]) -> Iterator[Shard]:
        yield from self.input_norm.shards(f"{prefix}input_layernorm.weight")
        yield from self.attention.shards(f"{prefix}self_attn.")
        yield from self.post_norm.shards(f"{prefix}post_attention_layernorm.weight")
        yield from self.mlp.shards(f"{prefix}mlp.", names)


class Decoder(nn.Module):
    """Token ids to logits. A family is a subclass that names the fields it reads and, where its tensors are called otherwise, them."""

    fields: ClassVar[type[BaseFields]]

    def __init__(self, config: ModelConfig, backends: Backends, max_length: int) -> None:
        super().__init__()
        self.group = backends.group
        self.tied = config.tied_embeddings
        self.embedding = VocabularyTable(config.vocab_size, config.hidden_size, backends)
        self.layers = nn.ModuleList(DecoderLayer(config, layer, backends) for layer in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = self.embedding if self.tied else VocabularyTable(config.vocab_size, config.hidden_size, backends)
        self.rotary = Rotary(config.rope, config.head_dim, max_length)

    def forward(self, batch: Batch, caches: Sequence[LayerCache]) -> Tensor:
        """Hidden states `[B, D]` of each row's last token, as the head takes them."""
        x = self.embedding.embed(batch.ids)
        residual = torch.zeros_like(x)
        rotation = self.rotary(batch.positions)
        layers: list[DecoderLayer] = [*self.layers]
        x = layers[0].input_norm.add(x, residual, self.group)
        for layer, cache, following in zip(layers, caches, (*layers[1:], None), strict=True):
            x = layer(x, residual, batch, cache, rotation, following)
        last = batch.last_tokens
        return self.norm.add(x, residual, self.group) if last is None else self.norm.add(x[last], residual[last], self.group)

    def layer_of_each_kind(self) -> nn.ModuleList:
        """A layer for each kind of them, and the last one: what they launch is all that the model's layers launch."""
        kinds: dict[object, nn.Module] = {}
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            kinds.setdefault((layer.attention.window, type(layer.mlp)), layer)
        return nn.ModuleList([*kinds.values(), self.layers[-1]])

    @staticmethod
    def plain(name: str) -> str:
        """What Llama calls the tensor that a checkpoint of this family calls `name`."""
        return name

    def shards(self, names: Set[str]) -> Iterator[Shard]:
        """What to load from a checkpoint that holds `names`."""
        files = {self.plain(name): name for name in names}
        for shard in self._plain_shards(files.keys()):
            yield replace(shard, name=files.get(shard.name, shard.name))

    def ignores(self, name: str) -> bool:
        """Whether a tensor that `shards` does not name may be in the checkpoint all the same."""
        # Old checkpoints hold the rotary frequencies, which follow from the config; some tied ones a head of their own.
        return name.endswith(".rotary_emb.inv_freq") or (bool(self.tied) and self.plain(name) == "lm_head.weight")

    def _plain_shards(self, names: Set[str]) -> Iterator[Shard]:
        yield from self.embedding.shards("model.embed_tokens.weight")
        for index, layer in enumerate(self.layers):
            yield from layer.shards(f"model.layers.{index}.", names)  # type: ignore[operator]
        yield from self.norm.shards("model.norm.weight")
        if not self.tied:
            yield from self.head.shards("lm_head.weight")
