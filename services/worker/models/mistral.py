"""Mistral: the plain decoder, with one sliding window for all layers where the config has one."""

from dataclasses import replace

from pydantic import PositiveInt

from services.worker.models.config import DecoderFields, ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.registry import register


class MistralFields(DecoderFields):
    sliding_window: PositiveInt | None = 4096

    def config(self) -> ModelConfig:
        return replace(super().config(), windows=(self.sliding_window,) * self.num_hidden_layers)


@register("MistralForCausalLM")
class Mistral(Decoder):
    fields = MistralFields
