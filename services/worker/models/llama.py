"""Llama: the plain decoder, with or without biases."""

from dataclasses import replace

from pydantic import PositiveInt

from services.worker.models.config import DecoderFields, ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.registry import register


class LlamaFields(DecoderFields):
    num_key_value_heads: PositiveInt | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    def config(self) -> ModelConfig:
        return replace(super().config(), qkv_bias=self.attention_bias, output_bias=self.attention_bias, mlp_bias=self.mlp_bias)


@register("LlamaForCausalLM")
class Llama(Decoder):
    fields = LlamaFields
