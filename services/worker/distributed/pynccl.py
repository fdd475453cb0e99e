"""Collectives by NCCL, called directly: nothing of torch.distributed between a layer and its GPU, and nothing to trip a graph capture."""

import ctypes

import torch
from torch import Tensor

from services.worker.distributed import nccl
from services.worker.distributed.torch_group import ControlGroup, in_columns


class NcclCommunicator:
    """Every call is queued on torch's current stream. Tensors are contiguous and on this rank's device."""

    transport = "nccl"

    def __init__(self, control: ControlGroup, device: torch.device) -> None:
        """Raises ConfigError when there is no usable NCCL."""
        self.rank, self.size, self._control = control.rank, control.size, control
        self._nccl = nccl.load()
        identity = nccl.UniqueId()
        if self.rank == 0:
            self._nccl("ncclGetUniqueId", ctypes.byref(identity))
        shared = nccl.UniqueId.from_buffer_copy(control.from_first(bytes(identity)))
        self._handle = ctypes.c_void_p()
        with torch.cuda.device(device):
            self._nccl("ncclCommInitRank", ctypes.byref(self._handle), self.size, shared, self.rank)

    def all_reduce(self, x: Tensor) -> Tensor:
        pointer = _pointer(x)
        self._nccl("ncclAllReduce", pointer, pointer, x.numel(), _data_type(x), nccl.SUM, self._handle, _stream())
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = x.new_empty(self.size, *x.shape)
        self._nccl("ncclAllGather", _pointer(x), _pointer(parts), x.numel(), _data_type(x), self._handle, _stream())
        return in_columns(parts)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        pointer = _pointer(x)
        self._nccl("ncclBroadcast", pointer, pointer, x.numel(), _data_type(x), source, self._handle, _stream())
        return x

    def minimum(self, value: int) -> int:
        return self._control.minimum(value)


def _pointer(x: Tensor) -> int:
    if not x.is_contiguous():
        raise ValueError(f"a collective takes contiguous tensors, got {tuple(x.shape)} with strides {x.stride()}")
    return x.data_ptr()


def _data_type(x: Tensor) -> int:
    return nccl.DATA_TYPES[str(x.dtype).removeprefix("torch.")]


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)
