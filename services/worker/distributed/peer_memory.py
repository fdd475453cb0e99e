"""Small sums through the memory of the other ranks' GPUs, for ranks of one host whose GPUs reach each other; the rest by another one."""

import json
from pathlib import Path

import torch
from torch import Tensor

from kernels.all_reduce import all_reduce, all_reduce_add_rms_norm, norm_is_fused, way_of
from kernels.mailboxes import Peers, mailbox_bytes
from kernels.rms_norm import add_rms_norm
from services.worker.distributed import cuda_driver
from services.worker.distributed.collectives import Collectives
from services.worker.distributed.cuda_driver import DriverError
from services.worker.distributed.torch_group import ControlGroup
from shared.errors import LockstepError

OFFER_BYTES = 2048
ERROR_LENGTH = 200  # of an offer's text; JSON may make six bytes of a character
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same for all processes of a machine, in whatever container


class NoPeerMemory(LockstepError):
    """The ranks do not reach each other's memory; the same on every rank."""


def meet(control: ControlGroup, device: torch.device) -> Peers:
    """The mailboxes of all ranks. Raises NoPeerMemory, on every rank, when one of them cannot have it."""
    offer, addresses = {"boot": "", "handle": "", "error": ""}, [0] * control.size
    try:
        offer["boot"] = BOOT_ID.read_text().strip()
        size = mailbox_bytes(control.size)
        torch.cuda.synchronize(device)  # makes the context current
        driver = cuda_driver.load()
        addresses[control.rank] = driver.allocate(size)
        torch.cuda.synchronize(device)  # zeroed before anybody hears of it
        offer["handle"] = driver.share(addresses[control.rank]).hex()
    except (OSError, ValueError, LockstepError) as error:
        offer["error"] = str(error)
    offers = _exchanged(control, offer)
    if len({each["boot"] for each in offers}) > 1:
        raise NoPeerMemory("the ranks are not on one machine")
    error_ = ""
    try:
        for rank, each in enumerate(offers):
            if rank != control.rank:
                addresses[rank] = driver.open(bytes.fromhex(each["handle"]))
    except DriverError as error:
        error_ = f"the memory of rank {rank}: {error}"
    _exchanged(control, {"error": error_})
    return Peers(control.rank, control.size, torch.tensor(addresses, device=device))


def _exchanged(control: ControlGroup, offer: dict[str, str]) -> list[dict[str, str]]:
    """What all ranks offer, by rank. Raises NoPeerMemory when one of them has an error."""
    offer["error"] = offer["error"][:ERROR_LENGTH]
    offers = [json.loads(each) for each in control.from_all(json.dumps(offer).encode().ljust(OFFER_BYTES))]
    for rank, each in enumerate(offers):
        if each["error"]:
            raise NoPeerMemory(f"rank {rank}: {each['error']}")
    return offers


class PeerMemoryCommunicator:
    """Another one, but for sums that `kernels.all_reduce` takes less time for. Queued on the current stream, for CUDA graphs too."""

    def __init__(self, inner: Collectives, peers: Peers) -> None:
        self.rank, self.size, self._inner, self._peers = inner.rank, inner.size, inner, peers
        self.transport = f"peer memory and {inner.transport}"

    def all_reduce(self, x: Tensor) -> Tensor:
        way = way_of(x, self.size)
        return self._inner.all_reduce(x) if way is None else all_reduce(x, self._peers, way)

    def all_reduce_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if norm_is_fused(x, self.size):
            return all_reduce_add_rms_norm(x, residual, weight, eps, self._peers)
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._inner.all_gather(x)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return self._inner.broadcast(x, source)

    def minimum(self, value: int) -> int:
        return self._inner.minimum(value)
