"""The mixture-of-experts layer. T tokens, D hidden size, E experts, N of them a token, I this rank's part of their size.

Every rank holds its part of every expert, as of a dense MLP, so that one sum over the ranks completes the layer.
"""

from collections.abc import Iterator, Set

import torch
from torch import Tensor, nn

from kernels.rms_norm import Unscaled
from services.worker.layers.backends import Backends
from services.worker.layers.linear import ALL, MergedColumnLinear, ReplicatedLinear, rows, share
from services.worker.layers.norm import RMSNorm
from services.worker.models.config import Experts
from services.worker.weights.shards import Shard


class MoE(nn.Module):
    reader = None  # the norm before this layer is the router's and the experts'

    def __init__(self, hidden_size: int, experts: Experts, backends: Backends) -> None:
        super().__init__()
        self.experts, self.backends = experts, backends
        self.own = rows(share(experts.intermediate_size, backends.group, "expert intermediate dimensions"))
        size = self.own.stop - self.own.start
        self.router = ReplicatedLinear("gate", hidden_size, experts.count, backends)
        self.gate_up = nn.Parameter(torch.empty(experts.count, 2 * size, hidden_size), requires_grad=False)
        self.down = nn.Parameter(torch.empty(experts.count, hidden_size, size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x `[T, D]` -> `[T, D]`, this rank's part of the sum."""
        return self.backends.experts(*self._routed(x))

    def add(self, x: Tensor | Unscaled, residual: Tensor, norm: RMSNorm, reader: MergedColumnLinear) -> Tensor:
        """residual += the sum of all ranks' part, in place; returns the norm of that, for any reader."""
        if self.backends.add_experts is not None:
            assert isinstance(x, Tensor)  # router and experts read the norm before: it has no single reader to end it
            return self.backends.add_experts(*self._routed(x), residual, norm.weight, norm.eps)
        return norm.add(self(x), residual, self.backends.group)

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, int, bool]:
        """What experts are given."""
        return x, self.gate_up, self.down, self.router(x), self.experts.per_token, self.experts.renormalise

    def shards(self, prefix: str, names: Set[str]) -> Iterator[Shard]:
        """From a tensor an expert and projection or, as transformers 5 has them in memory, from two tensors of all experts.

        Expert by expert also then: a slice stays small.
        """
        yield from self.router.shards(prefix)
        whole, hidden_size = self.experts.intermediate_size, self.down.shape[1]
        gate, up = self.own, slice(whole + self.own.start, whole + self.own.stop)
        packed = f"{prefix}experts.gate_up_proj" in names
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            targets = gate_up.chunk(2)
            if packed:
                one = slice(expert, expert + 1)
                shape = (self.experts.count, 2 * whole, hidden_size)
                for part, target in zip((gate, up), targets, strict=True):
                    yield Shard(f"{prefix}experts.gate_up_proj", shape, (one, part, ALL), target[None])
                yield Shard(f"{prefix}experts.down_proj", (self.experts.count, hidden_size, whole), (one, ALL, self.own), down[None])
            else:
                for name, target in zip(("gate_proj", "up_proj"), targets, strict=True):
                    yield Shard(f"{prefix}experts.{expert}.{name}.weight", (whole, hidden_size), (self.own, ALL), target)
                yield Shard(f"{prefix}experts.{expert}.down_proj.weight", (hidden_size, whole), (ALL, self.own), down)
