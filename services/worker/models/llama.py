"""Llama: the plain decoder."""

from services.worker.models.config import HFConfig, ModelConfig, decoder_config
from services.worker.models.decoder import Decoder
from services.worker.models.registry import register
from shared.errors import ConfigError


@register("LlamaForCausalLM")
class Llama(Decoder):
    @classmethod
    def config_from_hf(cls, hf: HFConfig) -> ModelConfig:
        for key in ("attention_bias", "mlp_bias"):
            if hf.get(key):
                raise ConfigError(f"{key} is not supported")
        return decoder_config(hf)
