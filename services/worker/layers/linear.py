"""Linear layers of one rank. T tokens, D hidden size, I intermediate size, Q and K query and KV heads, H head size.

Column-parallel layers split their outputs over the ranks, row-parallel ones their inputs: one all-reduce a pair.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from services.worker.distributed.communicator import Communicator
from services.worker.weights.shards import Shard
from shared.errors import ConfigError

ALL = slice(None)


def share(total: int, group: Communicator, what: str) -> range:
    """This rank's equal share. Raises ConfigError when there is none."""
    if total % group.size:
        raise ConfigError(f"tensor_parallel_size: {group.size} ranks do not divide {total} {what}")
    size = total // group.size
    return range(group.rank * size, (group.rank + 1) * size)


def head_share(kv_heads: int, group: Communicator) -> range:
    """The KV heads of this rank: an equal share or, with more ranks than heads, one that its neighbours hold too."""
    if max(kv_heads, group.size) % min(kv_heads, group.size):
        raise ConfigError(f"tensor_parallel_size: {group.size} ranks neither divide nor replicate {kv_heads} KV heads")
    first = group.rank * kv_heads // group.size
    return range(first, first + max(kv_heads // group.size, 1))


def rows(part: range, unit: int = 1) -> slice:
    """The slice of `unit` rows for each member of `part`."""
    return slice(part.start * unit, part.stop * unit)


class MergedColumnLinear(nn.Module):
    """Several column-parallel linears in one GEMM: `weight` is `[sum of this rank's outputs, D]`, in the order of `parts`."""

    def __init__(self, in_features: int, parts: dict[str, tuple[int, slice]]) -> None:
        """parts: checkpoint name -> (outputs of the whole layer, those of this rank)."""
        super().__init__()
        self.in_features, self.parts = in_features, parts
        self.sizes = [own.stop - own.start for _, own in parts.values()]
        self.weight = nn.Parameter(torch.empty(sum(self.sizes), in_features), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x `[T, D]` -> `[T, sum of this rank's outputs]`."""
        return F.linear(x, self.weight)

    def shards(self, prefix: str) -> Iterator[Shard]:
        targets = self.weight.split(self.sizes)
        for (name, (outputs, own)), target in zip(self.parts.items(), targets, strict=True):
            yield Shard(f"{prefix}{name}.weight", (outputs, self.in_features), (own, ALL), target)


def qkv_linear(hidden_size: int, head_dim: int, q_heads: int, kv_heads: int, group: Communicator) -> MergedColumnLinear:
    """Q, K and V of this rank's heads; `[(Q + K + K) * H, D]`."""
    q = rows(share(q_heads, group, "query heads"), head_dim)
    kv = rows(head_share(kv_heads, group), head_dim)
    widths = q_heads * head_dim, kv_heads * head_dim
    return MergedColumnLinear(hidden_size, {"q_proj": (widths[0], q), "k_proj": (widths[1], kv), "v_proj": (widths[1], kv)})


def gate_up_linear(hidden_size: int, intermediate_size: int, group: Communicator) -> MergedColumnLinear:
    """Gate and up projection of this rank's part of the intermediate size; `[2 * I, D]`."""
    own = rows(share(intermediate_size, group, "intermediate dimensions"))
    return MergedColumnLinear(hidden_size, {"gate_proj": (intermediate_size, own), "up_proj": (intermediate_size, own)})


class RowLinear(nn.Module):
    """Input split over the ranks; the all-reduce gives every rank the whole sum."""

    def __init__(self, name: str, in_features: int, own: slice, out_features: int, group: Communicator) -> None:
        super().__init__()
        self.name, self.in_features, self.own, self.group = name, in_features, own, group
        self.weight = nn.Parameter(torch.empty(out_features, own.stop - own.start), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x `[T, this rank's inputs]` -> `[T, D]`, the same on every rank."""
        return self.group.all_reduce(F.linear(x, self.weight))

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield Shard(f"{prefix}{self.name}.weight", (len(self.weight), self.in_features), (ALL, self.own), self.weight)
