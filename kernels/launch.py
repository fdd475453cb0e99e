"""What a launch depends on beside its arguments: the device's size and generation, and programmatic dependent launch (PDL).

With PDL the blocks of a kernel start while the one before it still drains, and stop at `gdc_wait` until all its writes are
visible. Every kernel here waits before its first access to memory that a kernel writes, then lets its own dependents start.
"""

import functools

import torch

HOPPER = (9, 0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 8 for a CPU, where only Triton's interpreter asks."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; (0, 0) for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a launch: the kernel's own PDL flag and the launcher's. Hopper and later have it."""
    supported = capability(device) >= HOPPER
    return {"PDL": supported, "launch_pdl": supported}
