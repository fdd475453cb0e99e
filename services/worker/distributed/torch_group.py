"""Collectives by torch.distributed: gloo between CPU ranks, NCCL between GPUs, and gloo for what is agreed at start on either."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shared.errors import PeerLost

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12


def in_columns(parts: Tensor) -> Tensor:
    """`[size, B, V]`, as collectives gather it -> `[B, size * V]`."""
    return parts.movedim(0, -2).flatten(-2)


class ControlGroup:
    """What the ranks agree on at start, over gloo; apart from the layers' collectives, whichever carries those."""

    def __init__(self, rank: int, size: int, rendezvous: str, timeout_s: float) -> None:
        """rendezvous: an init_method URL that all ranks share. Raises PeerLost when they have not all come in time."""
        self.rank, self.size = rank, size
        try:
            dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise PeerLost(f"the {size} ranks did not meet at {rendezvous} within {timeout_s:g} s: {reason}") from error

    def minimum(self, value: int) -> int:
        smallest = torch.tensor(value)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return int(smallest)

    def from_first(self, data: bytes) -> bytes:
        """What rank 0 gives; all give equally many bytes."""
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(content, 0)
        return bytes(content.tolist())

    def from_all(self, data: bytes) -> list[bytes]:
        """What every rank gives, by rank; all give equally many bytes."""
        ours = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(ours) for _ in range(self.size)]
        dist.all_gather(parts, ours)
        return [bytes(part.tolist()) for part in parts]


class TorchCommunicator:
    def __init__(self, control: ControlGroup, device: torch.device, timeout_s: float) -> None:
        """timeout_s: of one collective; the supervisor of a stalled group has ended it long before."""
        self.rank, self.size, self.transport, self._control = control.rank, control.size, BACKENDS[device.type], control
        self._group = dist.new_group(backend=self.transport, timeout=timedelta(seconds=timeout_s))

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty(self.size * x.numel())  # flat, as gloo wants it
        _all_gather(parts, x.flatten(), group=self._group)
        return in_columns(parts.view(self.size, *x.shape))

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        dist.broadcast(x, source, group=self._group)
        return x

    def minimum(self, value: int) -> int:
        return self._control.minimum(value)


class HostCommunicator:
    """Ranks that share a GPU, which NCCL refuses: through main memory, by gloo. Every call waits for the device."""

    def __init__(self, control: ControlGroup, timeout_s: float) -> None:
        """timeout_s: as of TorchCommunicator."""
        self.rank, self.size = control.rank, control.size
        self._host = TorchCommunicator(control, torch.device("cpu"), timeout_s)
        self.transport = self._host.transport

    def all_reduce(self, x: Tensor) -> Tensor:
        """Added up in float32, as NCCL adds up what is shorter."""
        host = x.cpu()
        return x.copy_(self._host.all_reduce(host.float() if host.is_floating_point() else host))

    def all_gather(self, x: Tensor) -> Tensor:
        return self._host.all_gather(x.cpu()).to(x.device)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x.copy_(self._host.broadcast(x.cpu(), source))

    def minimum(self, value: int) -> int:
        return self._host.minimum(value)
