"""How the ranks of a group add up and put together their shares of a layer's result."""

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed
from torch import Tensor

# Ranks wait for work at the ring, never inside a collective: a longer wait than this is a fault that the step deadline has seen before.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


class Communicator(Protocol):
    """The collectives of one tensor-parallel group. Every rank calls them in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place; returns x."""

    def all_gather(self, x: Tensor) -> Tensor:
        """x `[B, V]` of every rank -> `[B, size * V]`, in rank order."""

    def minimum(self, value: int) -> int:
        """The smallest value that any rank offers; for agreement at start."""


class SingleCommunicator:
    """A group of one rank: nothing to do."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def minimum(self, value: int) -> int:
        return value


class TorchCommunicator:
    """torch.distributed: gloo between CPU ranks."""

    def __init__(self, rank: int, size: int, rendezvous: str) -> None:
        """rendezvous: an init_method URL that all ranks share. Blocks until all of them have come."""
        self.rank, self.size = rank, size
        torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)

    def all_reduce(self, x: Tensor) -> Tensor:
        torch.distributed.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        torch.distributed.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    def minimum(self, value: int) -> int:
        smallest = torch.tensor(value)
        torch.distributed.all_reduce(smallest, op=torch.distributed.ReduceOp.MIN)
        return int(smallest)


def communicator(rank: int, size: int, rendezvous: str) -> Communicator:
    """The one that fits the group's size."""
    return SingleCommunicator() if size == 1 else TorchCommunicator(rank, size, rendezvous)
