"""Qwen2 and 2.5: biases on Q, K and V alone, and a sliding window that most checkpoints name but do not use."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from services.worker.models.config import DecoderFields, ModelConfig, layer_windows
from services.worker.models.decoder import Decoder
from services.worker.models.registry import register


class Qwen2Fields(DecoderFields):
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    max_window_layers: NonNegativeInt = 28
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None

    def config(self) -> ModelConfig:
        window = self.sliding_window if self.use_sliding_window else None
        return replace(super().config(), qkv_bias=True, windows=layer_windows(self._layer_types(window), window, self.num_hidden_layers))

    def _layer_types(self, window: int | None) -> Sequence[str]:
        if self.layer_types is not None:
            return self.layer_types
        full = self.num_hidden_layers if window is None else min(self.max_window_layers, self.num_hidden_layers)
        return ["full_attention"] * full + ["sliding_attention"] * (self.num_hidden_layers - full)


@register("Qwen2ForCausalLM")
class Qwen2(Decoder):
    fields = Qwen2Fields
