"""What computes: chosen once, at start, and handed to every layer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import gated_linear, linear
from kernels.moe import moe
from services.worker.attention.paged import paged_attention
from services.worker.attention.tiled import tiled_attention
from services.worker.distributed.communicator import Communicator
from services.worker.distributed.ordered import OrderedCommunicator
from services.worker.engine.batch import Batch
from services.worker.kvcache import LayerCache
from services.worker.layers.gemm import logits, tiled_gated_linear, tiled_linear
from services.worker.moe.grouped import grouped
from shared.errors import ConfigError

# x [T, D], weight [N, D], bias [N] or None -> [T, N]; gated: weight [2 * N, D], bias [2 * N]; see `kernels.linear`
LinearBackend = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# x [B, D], weight [V, D] -> [B, V] float32
LogitsBackend = Callable[[Tensor, Tensor], Tensor]
# q [T, Q, H], a layer's cache, the batch, the scale of scores, the window or None -> [T, Q, H]; see `attention.paged`
AttentionBackend = Callable[[Tensor, LayerCache, Batch, float, int | None], Tensor]
# x [T, D], gate_up [E, 2 * I, D], down [E, D, I], weights and ids [T, N] -> [T, D]; see `moe.reference`
ExpertsBackend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Backends:
    group: Communicator
    linear: LinearBackend
    gated_linear: LinearBackend
    logits: LogitsBackend
    attend: AttentionBackend
    experts: ExpertsBackend


def backends(group: Communicator, device: torch.device, deterministic: bool) -> Backends:
    """deterministic: a row's bits depend on its own tokens alone; on a CPU, with one thread. Raises ConfigError on another device."""
    if deterministic:
        if device.type != "cpu":
            raise ConfigError(f"deterministic: only on a CPU, these ranks compute on {device.type}")
        experts: ExpertsBackend = partial(grouped, linear=tiled_linear)
        return Backends(
            OrderedCommunicator(group), tiled_linear, tiled_gated_linear, partial(logits, linear=tiled_linear), tiled_attention, experts
        )
    experts = moe if device.type == "cuda" else partial(grouped, linear=F.linear)
    return Backends(group, linear, gated_linear, partial(logits, linear=linear), paged_attention, experts)
