"""Sums through the memory of other processes' GPUs: two processes on one GPU see whether they are right, two GPUs also how they last."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.all_reduce import (
    Way,
    all_reduce,
    all_reduce_add_rms_norm,
    all_reduce_add_rms_norm_torch,
    all_reduce_torch,
    fits,
    norm_is_fused,
    way_of,
)
from services.worker.distributed import cuda_driver
from services.worker.distributed.board import Mark
from services.worker.distributed.communicator import WatchedCommunicator
from services.worker.distributed.cuda_driver import Driver, DriverError
from services.worker.distributed.peer_memory import NoPeerMemory, PeerMemoryCommunicator, meet
from services.worker.distributed.preflight import preflight
from services.worker.distributed.torch_group import ControlGroup, HostCommunicator, TorchCommunicator
from tests.gpu.ranks import run

EPS = 1e-6
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COUNTS = (2, 130, 5_120, 32_768, 50_002, 262_144, 1_000_002)  # elements
ROWS = ((1, 5120), (3, 1024), (16, 4096), (1, 8192), (5, 896))
PLACES = [
    pytest.param((0, 0), id="one GPU"),
    pytest.param((0, 1), id="two GPUs", marks=pytest.mark.gpus(2)),
]


def parts(size: int, seed: int, *shape: int, dtype: torch.dtype) -> list[Tensor]:
    """The same on all ranks, made on the host, since GPUs' generators need not agree."""
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype) for rank in range(size)]


def alike(control: ControlGroup, x: Tensor) -> bool:
    """Whether x has the same bits on all ranks."""
    return len(set(control.from_all(hashlib.sha256(x.cpu().view(torch.uint8).numpy().tobytes()).digest()))) == 1


def every_way(control: ControlGroup, device: torch.device) -> int:
    """Each launch against the reference; how many there were."""
    peers, launches = meet(control, device), 0
    for dtype in DTYPES:
        for seed, count in enumerate(COUNTS):
            made = parts(control.size, seed, count, dtype=dtype)
            expected = all_reduce_torch(made)
            for way in Way:
                x = made[control.rank].to(device)
                if fits(x, way):
                    got = all_reduce(x, peers, way).cpu()
                    assert torch.equal(got, expected), (dtype, count, way, (got != expected).nonzero().flatten()[:8])
                    launches += 1
    return launches


def every_norm(control: ControlGroup, device: torch.device) -> int:
    peers, launches = meet(control, device), 0
    for dtype, ulp in zip(DTYPES, (2.0**-7, 2.0**-10, 2.0**-20), strict=True):
        for seed, shape in enumerate(ROWS):
            made = parts(control.size, seed, *shape, dtype=dtype)
            residual, weight = parts(1, seed + 50, *shape, dtype=dtype)[0], parts(1, seed + 60, shape[1], dtype=dtype)[0]
            own_residual, x = residual.to(device), made[control.rank].to(device)
            if not norm_is_fused(x, control.size):
                continue
            got = all_reduce_add_rms_norm(x, own_residual, weight.to(device), EPS, peers).cpu()
            expected = all_reduce_add_rms_norm_torch(made, residual, weight, EPS)  # changes residual too
            assert torch.equal(own_residual.cpu(), residual), (dtype, shape)
            torch.testing.assert_close(got.double(), expected.double(), rtol=2 * ulp, atol=2 * ulp)
            assert alike(control, got)
            launches += 1
    return launches


def in_graphs(control: ControlGroup, device: torch.device, replays: int) -> int:
    """A captured chain of all ways and the norm, each reading what the one before wrote, against the same chain by reference."""
    peers = meet(control, device)
    shape, dtype = (4, 5120), torch.bfloat16
    x, residual = torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)
    weight = parts(1, 7, shape[1], dtype=dtype)[0]
    own_weight = weight.to(device)

    def chain(y: Tensor, residual: Tensor, add: Callable[[Tensor, Way], Tensor], norm: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        for way in (*Way, *Way):
            y = norm(y, residual)
            y = add(y * 0.5, way)
        return y

    def launch() -> Tensor:
        return chain(
            x,
            residual,
            lambda y, way: all_reduce(y, peers, way),
            lambda y, kept: all_reduce_add_rms_norm(y, kept, own_weight, EPS, peers),
        )

    def reference(made: list[Tensor], residual: Tensor) -> Tensor:
        first = all_reduce_add_rms_norm_torch(made, residual, weight, EPS)

        def add(y: Tensor, way: Way) -> Tensor:
            return all_reduce_torch([y] * control.size)

        def norm(y: Tensor, kept: Tensor) -> Tensor:
            return all_reduce_add_rms_norm_torch([y] * control.size, kept, weight, EPS)

        return chain(first, residual, add, lambda y, kept: y if y is first else norm(y, kept))

    x.zero_()
    residual.zero_()
    launch()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = launch()
    for number in range(replays):
        made = parts(control.size, number, *shape, dtype=dtype)
        x.copy_(made[control.rank])
        residual.zero_()
        graph.replay()
        if number % max(1, replays // 5) == 0:
            expected = reference(made, torch.zeros(shape, dtype=dtype)).double()
            error = float((out.cpu().double() - expected).norm() / expected.norm())
            assert error < 5e-2, (number, error)
    assert alike(control, out)
    return replays


def as_a_communicator(control: ControlGroup, device: torch.device, shared: bool) -> list[str]:
    """The preflight's sums, and sums that are for the other transport."""
    inner = HostCommunicator(control, 60.0) if shared else TorchCommunicator(control, device, 60.0)
    group = WatchedCommunicator(PeerMemoryCommunicator(inner, meet(control, device)), Mark(None))
    times = preflight(group, device)
    large = torch.full((1 << 22,), control.rank + 1.0, device=device)
    assert way_of(large, control.size) is None
    assert torch.equal(group.all_reduce(large), torch.full_like(large, 3.0))
    whole = torch.arange(6, device=device) + control.rank
    assert torch.equal(group.all_reduce(whole), 2 * torch.arange(6, device=device) + 1)
    return [each.transport for each in times]


@pytest.mark.parametrize("devices", PLACES)
def test_every_way_is_the_reference_bit_by_bit(tmp_path: Path, devices: tuple[int, int]) -> None:
    first, second = run(every_way, tmp_path, devices)
    assert first == second > 2 * len(DTYPES) * len(COUNTS)


@pytest.mark.parametrize("devices", PLACES)
def test_the_fused_norm_is_that_of_the_sum_and_the_same_on_all_ranks(tmp_path: Path, devices: tuple[int, int]) -> None:
    first, second = run(every_norm, tmp_path, devices)
    assert first == second > 2 * len(DTYPES)


@pytest.mark.parametrize("devices", PLACES)
def test_captured_sums_go_on_counting(tmp_path: Path, devices: tuple[int, int]) -> None:
    run(in_graphs, tmp_path, devices, 5 if len(set(devices)) == 1 else 1000)


@pytest.mark.parametrize("devices", PLACES)
def test_a_communicator_tests_itself_and_leaves_the_rest_to_another(tmp_path: Path, devices: tuple[int, int]) -> None:
    shared = len(set(devices)) == 1
    names = run(as_a_communicator, tmp_path, devices, shared)
    assert names == [[f"peer memory and {'gloo' if shared else 'nccl'}"] * 4] * 2


class Broken(Driver):
    def open(self, handle: bytes) -> int:
        raise DriverError("out of order")


def refused(control: ControlGroup, device: torch.device) -> str:
    """What is told where rank 1's driver refuses to open memory."""
    with pytest.MonkeyPatch.context() as patch:
        if control.rank == 1:
            patch.setattr(cuda_driver, "Driver", Broken)
        try:
            meet(control, device)
        except NoPeerMemory as error:
            return str(error)
    return "they met"


def test_ranks_that_cannot_share_memory_are_told_so_on_all_ranks(tmp_path: Path) -> None:
    assert run(refused, tmp_path, (0, 0)) == ["rank 1: the memory of rank 0: out of order"] * 2
