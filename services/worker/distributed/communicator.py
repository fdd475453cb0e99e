"""How the ranks of a group add up and put together their shares of a layer's result.

B rows, V columns, T tokens, D hidden size.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kernels.rms_norm import add_rms_norm
from services.worker.distributed.board import Mark, Place
from services.worker.distributed.collectives import Collectives
from services.worker.distributed.peer_memory import NoPeerMemory, PeerMemoryCommunicator, meet
from services.worker.distributed.preflight import preflight
from services.worker.distributed.pynccl import NcclCommunicator
from services.worker.distributed.rendezvous import CommunicatorKind
from services.worker.distributed.sums import TESTING, Sums, SumTime, hints
from services.worker.distributed.torch_group import ControlGroup, HostCommunicator, TorchCommunicator
from shared.errors import ConfigError, PeerLost

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


class Communicator(Collectives, Protocol):
    """What the layers of one rank use."""

    sums: Sums  # as they were at the start

    def all_reduce_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds the sum over the ranks of x `[T, D]`, which may be overwritten, to residual `[T, D]` in place -> the RMSNorm of that."""


class SingleCommunicator:
    """A group of one rank: nothing to do."""

    rank = 0
    size = 1
    transport = "nothing"
    sums = Sums()

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return add_rms_norm(x, residual, weight, eps)

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

    sums = Sums()

    def __init__(self, inner: Collectives, mark: Mark) -> None:
        self.rank, self.size, self.transport, self._inner, self._mark = inner.rank, inner.size, inner.transport, inner, mark

    def all_reduce(self, x: Tensor) -> Tensor:
        self._mark.move(Place.ALL_REDUCE)
        try:
            self._inner.all_reduce(x)
        except RuntimeError as error:
            raise _failed("all_reduce", error) from error
        self._mark.move(Place.COMPUTING)
        return x

    def all_reduce_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not isinstance(self._inner, PeerMemoryCommunicator):
            return add_rms_norm(self.all_reduce(x), residual, weight, eps)
        self._mark.move(Place.ALL_REDUCE)
        normed = self._inner.all_reduce_add_rms_norm(x, residual, weight, eps)
        self._mark.move(Place.COMPUTING)
        return normed

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


def _no_progress(phase: str, part: float) -> None:
    pass


def communicator(
    rank: int,
    size: int,
    rendezvous: str,
    device: torch.device = CPU,
    kind: CommunicatorKind = "auto",
    start_timeout_s: float = 1800.0,
    step_timeout_s: float = 600.0,
    mark: Mark | None = None,
    progress: Callable[[str, float], None] = _no_progress,
    peer_memory: bool = True,
) -> Communicator:
    """The one of that kind that fits device and size, tested; auto: torch's. Blocks until all ranks have come to the rendezvous, a URL.

    progress: is told of the phases. peer_memory: GPUs of one host do small sums themselves. Raises ConfigError when the machine does
    not have what it needs, PeerLost when other ranks do not come in time, WrongSum when what it gives is wrong.
    """
    if kind == "pynccl" and device.type != "cuda":
        raise ConfigError(f"communicator: pynccl is for GPUs, these ranks compute on {device.type}: set auto or torch")
    if size == 1:
        return SingleCommunicator()
    mark = mark or Mark(None)
    progress("meeting the other ranks", 0.0)
    mark.move(Place.MEETING)
    control = ControlGroup(rank, size, rendezvous, start_timeout_s)
    mark.move(Place.COMPUTING)
    on_gpu, shares_gpu = device.type == "cuda", kind == "gloo"
    progress(TESTING + ("nccl" if on_gpu and not shares_gpu else "gloo"), 0.0)
    inner: Collectives
    try:
        if kind == "pynccl":
            inner = NcclCommunicator(control, device)
        elif on_gpu and shares_gpu:
            inner = HostCommunicator(control, step_timeout_s)
        else:
            inner = TorchCommunicator(control, device, step_timeout_s)
    except RuntimeError as error:
        raise _failed("the start of the communicator", error) from error
    group, times = _tested(inner, mark, device)
    fell_back = False
    if on_gpu and not shares_gpu and peer_memory:
        progress(f"{TESTING}peer memory", 0.0)
        try:
            group, more = _tested(PeerMemoryCommunicator(inner, meet(control, device)), mark, device)
            times += more
        except NoPeerMemory as error:
            fell_back = True
            if rank == 0:
                logger.warning("small sums go by nccl, which takes longer, since the GPUs do not share memory: %s", error)
    group.sums = Sums(times, fell_back)
    return group


def _tested(inner: Collectives, mark: Mark, device: torch.device) -> tuple[WatchedCommunicator, tuple[SumTime, ...]]:
    group = WatchedCommunicator(inner, mark)
    try:
        return group, preflight(group, device)
    except CollectiveFailed as error:
        raise CollectiveFailed(f"{error}; {hints(group.transport)}") from error
