"""Sums through the memory of other processes' GPUs: two processes on one GPU see whether they are right, two GPUs also how they last."""

import hashlib
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
    norm_fits,
)
from kernels.mailboxes import Peers
from services.worker.distributed import cuda_driver
from services.worker.distributed.board import Mark
from services.worker.distributed.communicator import WatchedCommunicator
from services.worker.distributed.cuda_driver import Driver, DriverError
from services.worker.distributed.peer_memory import NoPeerMemory, PeerMemoryCommunicator, meet
from services.worker.distributed.preflight import preflight
from services.worker.distributed.torch_group import ControlGroup, HostCommunicator, TorchCommunicator
from tests.gpu.ranks import run

EPS = 1e-6
CHAIN_ERROR = 5e-2  # of twelve operations in bfloat16, relative
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COUNTS = (2, 130, 5_120, 32_768, 50_002, 262_144, 1_000_002, 8_388_608)  # elements
ROWS = ((1, 5120), (3, 1024), (16, 4096), (1, 8192), (5, 896), (64, 5120))
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


# What a rank finds wrong is noted, not raised: the ranks must go on making the same launches.


def every_way(control: ControlGroup, peers: Peers, device: torch.device) -> list[str]:
    wrong = []
    for dtype in DTYPES:
        for seed, count in enumerate(COUNTS):
            made = parts(control.size, seed, count, dtype=dtype)
            expected = all_reduce_torch(made)
            for way in Way:
                x = made[control.rank].to(device, copy=True)
                if fits(x, way):
                    got = all_reduce(x, peers, way).cpu()
                    if not torch.equal(got, expected):
                        places = (got != expected).nonzero().flatten()
                        wrong.append(f"{way.value}, {count} {dtype}: {len(places)} wrong, first at {places[:8].tolist()}")
    return wrong


def every_norm(control: ControlGroup, peers: Peers, device: torch.device) -> list[str]:
    wrong = []
    for dtype, ulp in zip(DTYPES, (2.0**-7, 2.0**-10, 2.0**-20), strict=True):
        for seed, shape in enumerate(ROWS):
            made = parts(control.size, seed, *shape, dtype=dtype)
            residual, weight = parts(1, seed + 50, *shape, dtype=dtype)[0], parts(1, seed + 60, shape[1], dtype=dtype)[0]
            own_residual, x = residual.to(device, copy=True), made[control.rank].to(device)
            if not norm_fits(x):
                continue
            got = all_reduce_add_rms_norm(x, own_residual, weight.to(device), EPS, peers)
            expected = all_reduce_add_rms_norm_torch(made, residual, weight, EPS)  # changes residual too
            near = torch.allclose(got.cpu().double(), expected.double(), rtol=2 * ulp, atol=2 * ulp)
            if not (alike(control, got) and near and torch.equal(own_residual.cpu(), residual)):
                wrong.append(f"{shape} {dtype}: residual {torch.equal(own_residual.cpu(), residual)}, norm {near}")
    return wrong


def in_graphs(control: ControlGroup, peers: Peers, device: torch.device, replays: int) -> list[str]:
    """A captured chain of all ways and the norm, each reading what the one before wrote, against the same chain by reference."""
    shape, dtype = (4, 5120), torch.bfloat16
    x, residual = torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
    weight = parts(1, 7, shape[1], dtype=dtype)[0]
    own_weight = weight.to(device)

    def launch() -> Tensor:
        y = x
        for way in (*Way, *Way):
            y = all_reduce_add_rms_norm(y, residual, own_weight, EPS, peers)
            y = all_reduce(y * 0.5, peers, way)
        return y

    def reference(made: list[Tensor]) -> Tensor:
        kept = torch.zeros(shape, dtype=dtype)
        for _ in (*Way, *Way):
            y = all_reduce_add_rms_norm_torch(made, kept, weight, EPS)
            made = [all_reduce_torch([y * 0.5] * control.size)] * control.size
        return made[0]

    launch()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = launch()
    wrong = []
    for number in range(replays):
        made = parts(control.size, number, *shape, dtype=dtype)
        x.copy_(made[control.rank])
        residual.zero_()
        graph.replay()
        if number % max(1, replays // 5) == 0:
            expected = reference(made).double()
            error = float((out.cpu().double() - expected).norm() / expected.norm())
            if error > CHAIN_ERROR or not alike(control, out):
                wrong.append(f"replay {number}: relative error {error:.1e}")
    return wrong


def as_a_communicator(control: ControlGroup, peers: Peers, device: torch.device, shared: bool) -> list[str]:
    """The preflight's sums, which raise, and sums that are for the other transport."""
    inner = HostCommunicator(control, 60.0) if shared else TorchCommunicator(control, device, 60.0)
    group = WatchedCommunicator(PeerMemoryCommunicator(inner, peers), Mark(None))
    times = preflight(group, device)
    wrong = [] if {each.transport for each in times} == {f"peer memory and {inner.transport}"} else [str(times)]
    large = torch.full(((1 << 22) + 4,), control.rank + 1.0, device=device)
    if not torch.equal(group.all_reduce(large), torch.full_like(large, 3.0)):
        wrong.append("a large sum")
    whole = torch.arange(6, device=device) + control.rank
    if not torch.equal(group.all_reduce(whole), 2 * torch.arange(6, device=device) + 1):
        wrong.append("a sum of integers")
    return wrong


def everything(control: ControlGroup, device: torch.device, shared: bool) -> dict[str, list[str]]:
    peers = meet(control, device)
    return {
        "every way is the reference bit by bit": every_way(control, peers, device),
        "the fused norm is that of the sum, and the same on all ranks": every_norm(control, peers, device),
        "captured sums go on counting": in_graphs(control, peers, device, 5 if shared else 1000),
        "a communicator tests itself and leaves the rest to another": as_a_communicator(control, peers, device, shared),
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("devices", PLACES)
def test_sums_through_peer_memory_are_right(tmp_path: Path, devices: tuple[int, int]) -> None:
    for found in run(everything, tmp_path, devices, len(set(devices)) == 1):
        assert found == {name: [] for name in found}


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
