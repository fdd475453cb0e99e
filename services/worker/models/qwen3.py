"""Qwen3: Qwen2 with an RMSNorm over each query and key head; biases only where the config asks for them."""

from dataclasses import replace

from pydantic import PositiveInt

from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.qwen2 import Qwen2Fields
from services.worker.models.registry import register


class Qwen3Fields(Qwen2Fields):
    head_dim: PositiveInt | None = 128
    attention_bias: bool = False

    def config(self) -> ModelConfig:
        return replace(super().config(), qk_norm=True, qkv_bias=self.attention_bias, output_bias=self.attention_bias)


@register("Qwen3ForCausalLM")
class Qwen3(Decoder):
    fields = Qwen3Fields
