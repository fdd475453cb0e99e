"""What computes: chosen once, at start, and handed to every layer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from services.worker.attention.paged import paged_attention
from services.worker.distributed.communicator import Communicator
from services.worker.engine.batch import Batch
from services.worker.kvcache import LayerCache
from services.worker.moe.grouped import grouped

# x [T, D], weight [N, D], bias [N] or None -> [T, N]
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# q [T, Q, H], a layer's cache, the batch, the scale of scores, the window or None -> [T, Q, H]; see `attention.paged`
Attend = Callable[[Tensor, LayerCache, Batch, float, int | None], Tensor]
# x [T, D], ids and weights [T, N], gate_up [E, 2 * I, D], down [E, D, I] -> [T, D]; see `moe.reference`
Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Backends:
    group: Communicator
    linear: Linear
    attend: Attend
    experts: Experts


def fast_backends(group: Communicator) -> Backends:
    return Backends(group, F.linear, paged_attention, partial(grouped, linear=F.linear))
