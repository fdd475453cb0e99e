"""RMSNorm, alone or after the sum over the ranks and the residual addition. T tokens, D hidden size, I inputs of the product before it."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kernels.linear import begins_norm, linear_add_norm
from kernels.rms_norm import Unscaled, rms_norm
from services.worker.distributed.communicator import Communicator
from services.worker.layers.linear import ALL, MergedColumnLinear, RowLinear
from services.worker.weights.shards import Shard


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x `[T, D]` -> its norm, `[T, D]`."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor, group: Communicator) -> Tensor:
        """residual += the sum of all ranks' x `[T, D]`, in place; returns the norm of that, the same on every rank."""
        return group.all_reduce_add_rms_norm(x, residual, self.weight, self.eps)

    def after(self, x: Tensor, product: RowLinear, residual: Tensor, reader: MergedColumnLinear | None) -> Tensor | Unscaled:
        """residual += the sum of all ranks' product of x `[T, I]`, in place; returns the norm of that, as reader takes it.

        reader: what alone takes the norm, so that both products may make it between them; None: no product, or not it alone.
        """
        backends = product.backends
        if reader is not None and backends.begins_norms and begins_norm(x, product.weight, reader.weight, reader.gated):
            return linear_add_norm(x, product.weight, product.bias, residual, self.weight, self.eps)
        return self.add(product(x), residual, backends.group)

    def shards(self, name: str) -> Iterator[Shard]:
        yield Shard(name, tuple(self.weight.shape), (ALL,), self.weight)
