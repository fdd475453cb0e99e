"""The gated feed-forward layer. T tokens, D hidden size."""

from collections.abc import Iterator, Set

from torch import Tensor, nn

from kernels.rms_norm import Unscaled
from services.worker.layers.backends import Backends
from services.worker.layers.linear import MergedColumnLinear, RowLinear, gate_up_linear, rows, share
from services.worker.layers.norm import RMSNorm
from services.worker.weights.shards import Shard


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, backends: Backends) -> None:
        super().__init__()
        self.gate_up = gate_up_linear(hidden_size, intermediate_size, bias, backends)
        own = rows(share(intermediate_size, backends.group, "intermediate dimensions"))
        self.down = RowLinear("down_proj", intermediate_size, own, hidden_size, bias, backends)

    @property
    def reader(self) -> MergedColumnLinear:
        """What alone takes the norm before this layer."""
        return self.gate_up

    def forward(self, x: Tensor | Unscaled) -> Tensor:
        """x `[T, D]` -> `[T, D]`, this rank's part of the sum."""
        output: Tensor = self.down(self.gate_up(x))
        return output

    def add(self, x: Tensor | Unscaled, residual: Tensor, norm: RMSNorm, reader: MergedColumnLinear) -> Tensor | Unscaled:
        """See `RMSNorm.after`."""
        return norm.after(self.gate_up(x), self.down, residual, reader)

    def shards(self, prefix: str, names: Set[str]) -> Iterator[Shard]:
        yield from self.gate_up.shards(prefix)
        yield from self.down.shards(prefix)
