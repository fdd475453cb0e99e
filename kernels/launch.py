"""What a launch depends on beside its arguments: the device's size and generation, and programmatic dependent launch (PDL).

With PDL the blocks of a kernel start while the one before it still drains, and stop at `gdc_wait` until all its writes are
visible. Every kernel here waits before its first access to memory that the kernel before it writes, then lets its own dependents
start; programs with nothing to do may end before, as long as one of the kernel waits. So what was written by the one before that is
there even ahead of the wait: weights, the state of the slots, and what `plan_unpack` made of a plan, since a layer's kernels never follow
it at once. `rope_and_store` lets its dependents start before it waits itself: what they read ahead of their wait must be older than the
two kernels before them.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

HOPPER = (9, 0)
MAX_COUNTERS = 2**16  # far more programs than any device runs at a time

_pdl_allowed = True


def cdiv(count: int, size: int) -> int:
    """How many of `size` hold `count`. Triton's own, made to be called in kernels too, takes a third of what a launch costs the host."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The least power of two that is not below `count`; 1 for 0. See `cdiv`."""
    return 1 << max(count - 1, 0).bit_length()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 8 for a CPU, where only Triton's interpreter asks."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; (0, 0) for a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def allow_pdl(allowed: bool) -> None:
    """Whether later launches of this process use PDL where the device has it, as they do until told otherwise."""
    global _pdl_allowed
    _pdl_allowed = allowed


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a launch: the kernel's own PDL flag and the launcher's. Hopper and later have it."""
    used = _pdl_allowed and capability(device) >= HOPPER
    return {"PDL": used, "launch_pdl": used}


@functools.cache
def counters(device: torch.device) -> Tensor:
    """`[MAX_COUNTERS]` int32: how many programs of a group have finished. Zero between launches: the last of a group resets its own.

    Kernels of one stream share them; launches on different streams of a device must not overlap.
    """
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def prefetch(pointers, sizes):
    """Asks for `sizes` bytes from each of the pointers to be brought into the L2 cache; 0: for nothing. sm_90; multiples of 16."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointers.to(tl.int64), sizes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_line(addresses, wanted):
    """Asks for the 128 bytes around each of these addresses, int64, to be brought into the L2 cache, where wanted.

    The threads of a warp ask at once. With `prefetch` they take turns of a dozen instructions each, which larger pieces are worth.
    """
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [addresses, wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
