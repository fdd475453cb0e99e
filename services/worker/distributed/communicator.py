"""How the ranks of a group add up and put together their shares of a layer's result.

B rows, V columns.
"""

from typing import Protocol

import torch
from torch import Tensor

from services.worker.distributed.board import Mark, Place
from services.worker.distributed.pynccl import NcclCommunicator
from services.worker.distributed.rendezvous import CommunicatorKind
from services.worker.distributed.torch_group import ControlGroup, HostCommunicator, TorchCommunicator
from shared.errors import ConfigError, PeerLost

CPU = torch.device("cpu")


class Communicator(Protocol):
    """The collectives of one tensor-parallel group. Every rank calls them in the same order.

    On a GPU the first three are queued on the current stream like a kernel, and never wait for it: they may be captured in a
    CUDA graph; but for gloo's, which go through main memory. `minimum` waits, for the start only.
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place; returns x, which is contiguous."""

    def all_gather(self, x: Tensor) -> Tensor:
        """x `[B, V]` of every rank, in any dtype -> `[B, size * V]`, in rank order."""

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """The x of rank `source`, in place; returns x, which is contiguous."""

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

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x

    def minimum(self, value: int) -> int:
        return value


class CollectiveFailed(PeerLost):
    """A collective did not come to its end: mostly, another rank has died. That rank's end tells the cause."""


class WatchedCommunicator:
    """Another one, with the rank's mark moved before and after each collective, and failures told in a line."""

    def __init__(self, inner: Communicator, mark: Mark) -> None:
        self.rank, self.size, self._inner, self._mark = inner.rank, inner.size, inner, mark

    def all_reduce(self, x: Tensor) -> Tensor:
        self._mark.move(Place.ALL_REDUCE)
        try:
            self._inner.all_reduce(x)
        except RuntimeError as error:
            raise _failed("all_reduce", error) from error
        self._mark.move(Place.COMPUTING)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        self._mark.move(Place.ALL_GATHER)
        try:
            gathered = self._inner.all_gather(x)
        except RuntimeError as error:
            raise _failed("all_gather", error) from error
        self._mark.move(Place.COMPUTING)
        return gathered

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        self._mark.move(Place.BROADCAST)
        try:
            self._inner.broadcast(x, source)
        except RuntimeError as error:
            raise _failed("broadcast", error) from error
        self._mark.move(Place.COMPUTING)
        return x

    def minimum(self, value: int) -> int:
        self._mark.move(Place.AGREEING)
        try:
            smallest = self._inner.minimum(value)
        except RuntimeError as error:
            raise _failed("the start's agreement", error) from error
        self._mark.move(Place.COMPUTING)
        return smallest


def _failed(what: str, error: RuntimeError) -> CollectiveFailed:
    return CollectiveFailed(f"{what} failed: {str(error).splitlines()[0]}")


def communicator(
    rank: int,
    size: int,
    rendezvous: str,
    device: torch.device = CPU,
    kind: CommunicatorKind = "auto",
    start_timeout_s: float = 1800.0,
    step_timeout_s: float = 600.0,
    mark: Mark | None = None,
) -> Communicator:
    """The one of that kind that fits device and size; auto: torch's. Blocks until all ranks have come to the rendezvous, a URL.

    Raises ConfigError when the machine does not have what it needs, PeerLost when other ranks do not come in time.
    """
    if kind == "pynccl" and device.type != "cuda":
        raise ConfigError(f"communicator: pynccl is for GPUs, these ranks compute on {device.type}: set auto or torch")
    if size == 1:
        return SingleCommunicator()
    mark = mark or Mark(None)
    mark.move(Place.MEETING)
    control = ControlGroup(rank, size, rendezvous, start_timeout_s)
    mark.move(Place.COMPUTING)
    try:
        inner: Communicator
        if kind == "pynccl":
            inner = NcclCommunicator(control, device)
        elif kind == "gloo" and device.type == "cuda":
            inner = HostCommunicator(control, step_timeout_s)
        else:
            inner = TorchCommunicator(control, device, step_timeout_s)
    except RuntimeError as error:
        raise _failed("the start of the communicator", error) from error
    return WatchedCommunicator(inner, mark)
