"""Mixtral: a Mistral whose layers all have experts, in a checkpoint that calls them otherwise."""

from dataclasses import replace
from typing import ClassVar

from pydantic import PositiveInt

from services.worker.models.config import IGNORED, Experts, ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.mistral import MistralFields
from services.worker.models.registry import register

PLAIN = {".block_sparse_moe.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}


class MixtralFields(MistralFields):
    ignored: ClassVar[frozenset[str]] = IGNORED | {"router_jitter_noise"}  # of training

    rope_theta: float = 1_000_000.0
    sliding_window: PositiveInt | None = None
    num_local_experts: PositiveInt = 8
    num_experts_per_tok: PositiveInt = 2

    def config(self) -> ModelConfig:
        experts = Experts(
            count=self.num_local_experts,
            per_token=self.num_experts_per_tok,
            intermediate_size=self.intermediate_size,
            renormalise=True,
            layers=frozenset(range(self.num_hidden_layers)),
        )
        return replace(super().config(), experts=experts)


@register("MixtralForCausalLM")
class Mixtral(Decoder):
    fields = MixtralFields

    @staticmethod
    def plain(name: str) -> str:
        for theirs, plain in PLAIN.items():
            name = name.replace(theirs, plain)
        return name
