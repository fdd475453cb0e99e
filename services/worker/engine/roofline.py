"""How long a step takes on a GPU that is not there: what it reads at the memory's speed, or what it computes at the cores', and launches.

Bytes and operations are counted from a model's shape; the shares of the peaks that kernels reach are round figures, the same for
every GPU. So ratios between batch sizes, models and GPUs mean something, single figures are within some ten percent.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import ConfigError

MEMORY_SHARE = 0.8  # of the peak, that kernels reach
COMPUTE_SHARE = 0.6
ELEMENT_BYTES = 2  # bfloat16
LAUNCHES_PER_LAYER = 9
MOE_LAUNCHES_PER_LAYER = 13
LAUNCH_US = 1.5  # between two kernels of a graph
STEP_US = 30.0  # sampling, unpacking, result: once a step
ALL_REDUCE_US = 8.0  # latency; two a layer with tensor parallelism
ALL_REDUCE_GB_S = 200.0
CACHE_SHARE = 0.9  # of the memory, for weights and KV cache together


@dataclass(frozen=True)
class GPU:
    memory_gb: float
    memory_tb_s: float
    tflops: float  # dense bfloat16


GPUS = {
    "a100": GPU(80, 2.04, 312),
    "h100": GPU(80, 3.35, 989),
    "h200": GPU(141, 4.8, 989),
    "l40s": GPU(48, 0.864, 362),
}


@dataclass(frozen=True)
class Shape:
    """What a decoder's step costs depends on; a dense model has one expert, of which each token takes one."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int  # of one expert
    vocab_size: int
    tied: bool  # the embedding is the output matrix too
    experts: int = 1
    experts_per_token: int = 1

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Shape":
        """Of a Hugging Face config.json. Raises ConfigError telling of the field that is missing or makes no sense."""
        try:
            heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
            experts = int(config.get("num_experts") or config.get("num_local_experts") or 1)
            intermediate = config.get("moe_intermediate_size") if experts > 1 else None
            return cls(
                layers=int(config["num_hidden_layers"]),
                hidden_size=hidden_size,
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden_size // heads),
                intermediate_size=int(intermediate or config["intermediate_size"]),
                vocab_size=int(config["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                experts=experts,
                experts_per_token=int(config.get("num_experts_per_tok") or 1) if experts > 1 else 1,
            )
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"config: config.json does not tell the model's shape: {error!r}") from error

    @property
    def attention_weights(self) -> int:
        """Of one layer."""
        return self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Of one expert of one layer."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def weight_bytes(self) -> int:
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return ELEMENT_BYTES * (self.layers * (self.attention_weights + self.experts * self.expert_weights) + embeddings)

    @property
    def kv_bytes_per_token(self) -> int:
        return ELEMENT_BYTES * 2 * self.layers * self.kv_heads * self.head_dim


MODELS = {
    "0.6b": Shape(28, 1024, 16, 8, 128, 3072, 151_936, tied=True),
    "8b": Shape(36, 4096, 32, 8, 128, 12_288, 151_936, tied=False),
    "14b": Shape(40, 5120, 40, 8, 128, 17_408, 151_936, tied=False),
}


@dataclass(frozen=True)
class Roofline:
    """Times of one group: `ranks` GPUs that share each layer."""

    gpu: GPU
    shape: Shape
    ranks: int = 1

    def cache_pages(self, page_size: int) -> int:
        """Pages of KV cache that the GPUs hold beside the weights. Raises ConfigError when these do not fit."""
        room = CACHE_SHARE * self.ranks * self.gpu.memory_gb * 1e9 - self.shape.weight_bytes
        pages = int(room // (page_size * self.shape.kv_bytes_per_token))
        if pages < 2:
            raise ConfigError(
                f"simulated_model: {self.shape.weight_bytes / 1e9:.0f} GB of weights leave no room in {self.ranks} GPUs "
                f"of {self.gpu.memory_gb:g} GB"
            )
        return pages

    def step_us(self, tokens: int, sampled: int, context_tokens: int, attended_tokens: int) -> int:
        """tokens: decode rows and prefill tokens; sampled: rows that yield a token; context_tokens: that are read from the KV cache,
        all rows together; attended_tokens: the sum, over `tokens`, of what each attends to."""
        shape = self.shape
        # The share of experts that `tokens` draws of some of them hit, each draw on its own.
        hit = 1 - (1 - shape.experts_per_token / shape.experts) ** tokens
        layer_read = shape.attention_weights + hit * shape.experts * shape.expert_weights
        output = shape.vocab_size * shape.hidden_size
        read = ELEMENT_BYTES * (shape.layers * layer_read + output * bool(sampled)) + context_tokens * shape.kv_bytes_per_token
        weights_used = shape.attention_weights + shape.experts_per_token * shape.expert_weights
        operations = 2 * (shape.layers * weights_used * tokens + output * sampled)
        operations += 4 * shape.layers * shape.heads * shape.head_dim * attended_tokens
        memory_us = read / (self.gpu.memory_tb_s * MEMORY_SHARE) / 1e6
        compute_us = operations / (self.gpu.tflops * COMPUTE_SHARE) / 1e6
        launches = shape.layers * (LAUNCHES_PER_LAYER if shape.experts == 1 else MOE_LAUNCHES_PER_LAYER)
        us = STEP_US + launches * LAUNCH_US + max(memory_us, compute_us) / self.ranks
        if self.ranks > 1:
            moved = ELEMENT_BYTES * tokens * shape.hidden_size
            us += 2 * shape.layers * (ALL_REDUCE_US + moved / ALL_REDUCE_GB_S / 1e3)
        return max(round(us), 1)
