"""The ranks' first sums, before anything is loaded: that they come to an end, that they are right, and how fast they are.

What fails here fails in one line that names the ranks and what to set, instead of in the middle of the first request. A sum that does
not come to an end cannot tell so itself: the supervisor does, which sees how long the phase takes.
"""

import logging
import time

import torch
from torch import Tensor

from services.worker.distributed.collectives import Collectives
from services.worker.distributed.sums import SumTime, hints
from shared.errors import LockstepError

logger = logging.getLogger(__name__)

SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 24)  # bytes, from latency to bandwidth: every way that peer memory has
CPU_SIZES = (1 << 12, 1 << 16, 1 << 20)
REPEATS, CPU_REPEATS = 10, 2
VALUES = 64  # that the numbers go round in: bfloat16 has all of them exactly


class WrongSum(LockstepError):
    """An all-reduce came to an end with something else than the sum."""


def preflight(group: Collectives, device: torch.device) -> tuple[SumTime, ...]:
    """What an all-reduce takes, by its size, the smallest first. Raises WrongSum, or whatever the transport raises."""
    on_gpu = device.type == "cuda"
    sizes, dtype = (SIZES, torch.bfloat16) if on_gpu else (CPU_SIZES, torch.float32)
    times = []
    for size in sizes:
        count = size // dtype.itemsize
        check(group.all_reduce(part(group.rank, group.size, count, dtype, device)), group, size)
        seconds = _seconds(group, torch.zeros(count, dtype=dtype, device=device), REPEATS if on_gpu else CPU_REPEATS)
        times.append(SumTime(group.transport, group.size, size, seconds))
    if group.rank == 0:
        told = ", ".join(f"{each.size >> 10} KiB {1e6 * each.seconds:.0f} us ({each.bus_bandwidth / 1e9:.3g} GB/s)" for each in times)
        logger.info("sums over %d ranks by %s are right: %s", group.size, group.transport, told)
    return tuple(times)


def part(rank: int, size: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What a rank adds: of element i, only rank `i % size` knows the value, so that a wrong sum names the rank whose part is wrong."""
    values = _values(size, count, dtype, device)
    return values * (torch.arange(count, device=device) % size == rank)


def check(total: Tensor, group: Collectives, size: int) -> None:
    """Raises WrongSum, naming the ranks whose parts are not in the sum as they should be."""
    expected = _values(group.size, total.numel(), total.dtype, total.device)
    wrong = (total != expected).nonzero().flatten()
    if not len(wrong):
        return
    ranks, first = (wrong % group.size).unique().tolist(), int(wrong[0])
    named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    raise WrongSum(
        f"the parts of {named} did not arrive as they were sent: an all-reduce of {size} bytes by {group.transport} gave "
        f"{float(total[first]):g} as element {first}, not {float(expected[first]):g}, and {len(wrong)} of {total.numel()} are wrong; "
        + hints(group.transport)
    )


def _values(size: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (1 + torch.arange(count, device=device) // size % VALUES).to(dtype)


def _seconds(group: Collectives, zeros: Tensor, repeats: int) -> float:
    """Of one, when several follow each other."""

    def wait() -> None:
        if zeros.is_cuda:
            torch.cuda.synchronize(zeros.device)

    group.all_reduce(zeros)
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        group.all_reduce(zeros)
    wait()
    return (time.perf_counter() - start) / repeats
