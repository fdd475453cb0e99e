"""Qwen3 with routed experts in every `decoder_sparse_step`-th layer, but for those of `mlp_only_layers`."""

from dataclasses import replace

from pydantic import AliasChoices, Field, NonNegativeInt, PositiveInt

from services.worker.models.config import DecoderFields, Experts, ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.registry import register


class Qwen3MoeFields(DecoderFields):
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    num_experts: NonNegativeInt = Field(128, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: PositiveInt = 8
    moe_intermediate_size: PositiveInt = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: list[NonNegativeInt] | None = None

    def config(self) -> ModelConfig:
        layers = range(self.decoder_sparse_step - 1, self.num_hidden_layers if self.num_experts else 0, self.decoder_sparse_step)
        return replace(
            super().config(),
            qk_norm=True,
            qkv_bias=self.attention_bias,
            output_bias=self.attention_bias,
            windows=(self.sliding_window if self.use_sliding_window else None,) * self.num_hidden_layers,
            experts=Experts(
                count=self.num_experts,
                per_token=self.num_experts_per_tok,
                intermediate_size=self.moe_intermediate_size,
                renormalise=self.norm_topk_prob,
                layers=frozenset(layers).difference(self.mlp_only_layers or ()),
            ),
        )


@register("Qwen3MoeForCausalLM")
class Qwen3Moe(Decoder):
    fields = Qwen3MoeFields
