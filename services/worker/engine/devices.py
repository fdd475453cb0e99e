"""Which device a rank computes on."""

import logging

import torch
import triton

from kernels.tuning import borrowed
from services.worker.distributed.rendezvous import CommunicatorKind
from services.worker.engine.interface import RankSpec
from services.worker.engine.sizes import ALIGNED
from shared.errors import ConfigError

logger = logging.getLogger(__name__)

HOST_KV_CACHE_BYTES = 1 << 30  # of a rank on a CPU that nobody told otherwise


def device_of(spec: RankSpec) -> torch.device:
    """The rank's device, made the current one. Raises ConfigError when the machine has none for it."""
    kind = spec.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    count, index = torch.cuda.device_count(), spec.local_rank // spec.ranks_per_gpu
    if index >= count:
        wanted = -(-spec.local_ranks // spec.ranks_per_gpu)
        raise ConfigError(
            f"device: {spec.local_ranks} ranks, {spec.ranks_per_gpu} a GPU, need {wanted} GPUs, this machine has {count}: "
            "set --tensor-parallel-size, or --device cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def communicator_of(spec: RankSpec, device: torch.device) -> CommunicatorKind:
    """How these ranks can add up. Raises ConfigError for what does not go together."""
    if device.type != "cuda":
        return spec.communicator
    kind = spec.communicator
    if spec.ranks_per_gpu > 1:
        if kind not in ("auto", "gloo"):
            raise ConfigError(f"communicator: {kind}: NCCL refuses ranks that share a GPU (ranks_per_gpu={spec.ranks_per_gpu}): set auto")
        kind = "gloo"
    if kind == "gloo" and spec.cuda_graphs and spec.ranks > 1:
        raise ConfigError("communicator: gloo goes through main memory, which no CUDA graph can hold: set --cuda-graphs false")
    return kind


def check_gpu(spec: RankSpec, max_length: int) -> None:
    """Raises ConfigError for what only other devices can."""
    if max_length < ALIGNED:
        raise ConfigError(f"max_model_len: on a GPU at least {ALIGNED}, got {max_length}")
    if spec.cuda_graphs and spec.sampling_gather == "candidates":
        raise ConfigError("sampling_gather: candidates counts on the host, which no CUDA graph can hold: set --cuda-graphs false, or best")


def dtype_of(spec: RankSpec, device: torch.device) -> torch.dtype:
    if spec.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def tell_borrowed(device: torch.device) -> None:
    """Logs, in one line, which shapes have run so far with tiles that were found with another Triton than this one."""
    shapes = borrowed(device)
    if shapes:
        logger.warning(
            "tiles of %d shapes were found with Triton %s and %s runs here: they compute the same, perhaps not as fast as could be; "
            "`python -m benchmarks tune` and `tune-experts` find those of this version (%s)",
            len(shapes), ", ".join(sorted(set(shapes.values()))), triton.__version__, "; ".join(sorted(shapes)),
        )  # fmt: skip
