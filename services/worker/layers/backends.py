"""What computes: chosen once, at start, and handed to every layer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fixed_linear import fixed_gated_linear, fixed_linear
from kernels.linear import gated_linear, linear, widened_linear
from kernels.moe import fixed_moe, moe, moe_add_norm
from kernels.offering_head import Noise, Scores, offering_head
from kernels.rope import rope_and_store
from kernels.rotated_attention import rotated_attention
from services.worker.attention.paged import chunked_attention, paged_attention
from services.worker.attention.tiled import tiled_attention
from services.worker.distributed.communicator import Communicator
from services.worker.distributed.ordered import OrderedCommunicator
from services.worker.engine.batch import Batch
from services.worker.kvcache import LayerCache
from services.worker.layers.gemm import tiled_gated_linear, tiled_linear, tiled_logits
from services.worker.moe.grouped import grouped

# x [T, D], or Unscaled where norms may be begun, weight [N, D], bias [N] or None -> [T, N]; gated: weight [2 * N, D], bias [2 * N];
# see `kernels.linear`
LinearBackend = Callable[[Any, Tensor, Tensor | None], Tensor]
# x [B, D], weight [V, D] -> [B, V] float32
LogitsBackend = Callable[[Tensor, Tensor], Tensor]
# x [B, D], weight [V, D], ids of it that are no padding, the first, the noise of rows, which ask for more, whether all logits are wanted
# -> None: take the logits; see `kernels.offering_head`
OffersBackend = Callable[[Tensor, Tensor, int, int, Noise | None, Tensor | None, bool], Scores | None]
# q [T, Q, H], a layer's cache, the batch, the scale of scores, the window or None -> [T, Q, H]; see `attention.paged`
AttentionBackend = Callable[[Tensor, LayerCache, Batch, float, int | None], Tensor]
# x [T, D], gate_up [E, 2 * I, D], down [E, D, I], the router's logits [T, E], experts of a token, whether their weights are scaled
# -> [T, D]; see `kernels.moe`
ExpertsBackend = Callable[[Tensor, Tensor, Tensor, Tensor, int, bool], Tensor]
# those, the residual [T, D], which takes their result in place, a norm's weight [D] and eps -> the norm of that, [T, D]
AddExpertsBackend = Callable[[Tensor, Tensor, Tensor, Tensor, int, bool, Tensor, Tensor, float], Tensor]
RotationBackend = Callable[..., Tensor]  # see `kernels.rope.rope_and_store`
RotatedAttentionBackend = Callable[..., Tensor]  # see `kernels.rotated_attention`


@dataclass(frozen=True)
class Backends:
    group: Communicator
    linear: LinearBackend
    gated_linear: LinearBackend
    logits: LogitsBackend
    attend: AttentionBackend
    experts: ExpertsBackend
    rotate: RotationBackend = rope_and_store
    attend_rotated: RotatedAttentionBackend | None = None  # of decode rows that `rotates_within` names; None: rotate, then attend
    begins_norms: bool = False  # whether the products around a norm may make it: see `kernels.linear.begins_norm`
    add_experts: AddExpertsBackend | None = None  # None: experts, then the norm of the group
    offers: OffersBackend | None = None  # None: rows are chosen by their logits, all of them


def backends(group: Communicator, device: torch.device, deterministic: bool) -> Backends:
    """deterministic: a row's bits depend on its own tokens alone; on a CPU, with one thread."""
    on_gpu = device.type == "cuda"
    if not deterministic:
        alone = group.size == 1  # a sum over ranks is complete only behind the product
        return Backends(
            group,
            linear,
            gated_linear,
            widened_linear,
            paged_attention,
            experts=moe if on_gpu else partial(grouped, linear=F.linear),
            attend_rotated=rotated_attention if on_gpu else None,
            begins_norms=alone,
            add_experts=moe_add_norm if on_gpu and alone else None,
            offers=offering_head if on_gpu else None,
        )
    if on_gpu:
        return Backends(
            group=OrderedCommunicator(group),
            linear=fixed_linear,
            gated_linear=fixed_gated_linear,
            logits=partial(fixed_linear, bias=None, dtype=torch.float32),
            attend=chunked_attention,
            experts=fixed_moe,
            rotate=partial(rope_and_store, heads=1),
        )
    tiled_experts: ExpertsBackend = partial(grouped, linear=tiled_linear)
    return Backends(OrderedCommunicator(group), tiled_linear, tiled_gated_linear, tiled_logits, tiled_attention, tiled_experts)
