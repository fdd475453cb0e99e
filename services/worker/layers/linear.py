"""Linear layers of one rank. T tokens, D hidden size, I intermediate size, Q and K query and KV heads, H head size.

Column-parallel layers split their outputs over the ranks, row-parallel ones their inputs: one sum over the ranks a pair, which the norm
behind it makes.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kernels.rms_norm import Unscaled
from services.worker.distributed.communicator import Communicator
from services.worker.layers.backends import Backends
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


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class MergedColumnLinear(nn.Module):
    """Several column-parallel linears in one GEMM: `weight` is `[sum of this rank's outputs, D]`, in the order of `parts`."""

    def __init__(self, in_features: int, parts: dict[str, tuple[int, slice]], bias: bool, backends: Backends, gated: bool = False) -> None:
        """parts: checkpoint name -> (outputs of the whole layer, those of this rank). gated: of two parts, with the activation."""
        super().__init__()
        self.in_features, self.parts, self.gated = in_features, parts, gated
        self.multiply = backends.gated_linear if gated else backends.linear
        self.sizes = [own.stop - own.start for _, own in parts.values()]
        self.weight = _parameter(sum(self.sizes), in_features)
        self.bias = _parameter(sum(self.sizes)) if bias else None

    def forward(self, x: Tensor | Unscaled) -> Tensor:
        """x `[T, D]` -> `[T, sum of this rank's outputs]`, gated: half as many."""
        return self.multiply(x, self.weight, self.bias)

    def shards(self, prefix: str) -> Iterator[Shard]:
        for (name, (outputs, own)), target in zip(self.parts.items(), self.weight.split(self.sizes), strict=True):
            yield Shard(f"{prefix}{name}.weight", (outputs, self.in_features), (own, ALL), target)
        if self.bias is not None:
            for (name, (outputs, own)), target in zip(self.parts.items(), self.bias.split(self.sizes), strict=True):
                yield Shard(f"{prefix}{name}.bias", (outputs,), (own,), target)


def qkv_linear(hidden_size: int, head_dim: int, q_heads: int, kv_heads: int, bias: bool, backends: Backends) -> MergedColumnLinear:
    """Q, K and V of this rank's heads; `[(Q + K + K) * H, D]`."""
    q = rows(share(q_heads, backends.group, "query heads"), head_dim)
    kv = rows(head_share(kv_heads, backends.group), head_dim)
    widths = q_heads * head_dim, kv_heads * head_dim
    parts = {"q_proj": (widths[0], q), "k_proj": (widths[1], kv), "v_proj": (widths[1], kv)}
    return MergedColumnLinear(hidden_size, parts, bias, backends)


def gate_up_linear(hidden_size: int, intermediate_size: int, bias: bool, backends: Backends) -> MergedColumnLinear:
    """Gate and up projection of this rank's part of the intermediate size, and the activation; `[2 * I, D]`."""
    own = rows(share(intermediate_size, backends.group, "intermediate dimensions"))
    parts = {"gate_proj": (intermediate_size, own), "up_proj": (intermediate_size, own)}
    return MergedColumnLinear(hidden_size, parts, bias, backends, gated=True)


class RowLinear(nn.Module):
    """Input split over the ranks, whose outputs add up to the layer's. Rank 0 adds the bias, once for all."""

    def __init__(self, name: str, in_features: int, own: slice, out_features: int, bias: bool, backends: Backends) -> None:
        super().__init__()
        self.name, self.in_features, self.own, self.backends = name, in_features, own, backends
        self.weight = _parameter(out_features, own.stop - own.start)
        self.bias = _parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x `[T, this rank's inputs]` -> `[T, D]`, this rank's part of the sum."""
        return self.backends.linear(x, self.weight, self.bias if self.backends.group.rank == 0 else None)

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield Shard(f"{prefix}{self.name}.weight", (len(self.weight), self.in_features), (ALL, self.own), self.weight)
        if self.bias is not None:
            yield Shard(f"{prefix}{self.name}.bias", tuple(self.bias.shape), (ALL,), self.bias)


class ReplicatedLinear(nn.Module):
    """The same on every rank, for a layer so small that splitting it costs more."""

    def __init__(self, name: str, in_features: int, out_features: int, backends: Backends) -> None:
        super().__init__()
        self.name, self.backends = name, backends
        self.weight = _parameter(out_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        """x `[T, D]` -> `[T, outputs]`."""
        return self.backends.linear(x, self.weight, None)

    def shards(self, prefix: str) -> Iterator[Shard]:
        yield Shard(f"{prefix}{self.name}.weight", tuple(self.weight.shape), (ALL, ALL), self.weight)
