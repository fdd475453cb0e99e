"""What any transport does for the ranks of a group. B rows, V columns."""

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """The collectives of one tensor-parallel group. Every rank calls them in the same order.

    On a GPU the first three are queued on the current stream like a kernel, and never wait for it: they may be captured in a
    CUDA graph; but for gloo's, which go through main memory. `minimum` waits, for the start only.
    """

    rank: int
    size: int
    transport: str  # for people: "nccl", "gloo", "peer memory and nccl"

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place; returns x, which is contiguous."""

    def all_gather(self, x: Tensor) -> Tensor:
        """x `[B, V]` of every rank, in any dtype -> `[B, size * V]`, in rank order."""

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """The x of rank `source`, in place; returns x, which is contiguous."""

    def minimum(self, value: int) -> int:
        """The smallest value that any rank offers; for agreement at start."""
