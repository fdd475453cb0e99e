"""What is told of the ranks' first sums, when they are wrong, and when they do not end."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from kernels.all_reduce import WAYS, way_of
from kernels.mailboxes import MAX_RANKS
from services.worker.distributed.communicator import SingleCommunicator
from services.worker.distributed.preflight import SIZES, WrongSum, check, part, preflight
from services.worker.distributed.sums import TESTING, Sums, SumTime, hints
from services.worker.engine.interface import Facts, Memory
from services.worker.messages import Loading, Ready, decode, encode
from services.worker.metrics import WorkerMetrics
from services.worker.ranks import GroupFailed
from services.worker.settings import WorkerSettings
from services.worker.supervisor import Supervisor
from shared.settings import load

CPU = torch.device("cpu")
SIZE = 4


class Wire(SingleCommunicator):
    """What rank 0 of SIZE sees of a transport: the others' parts as they left, but where `spoil` changes the sum."""

    size = SIZE
    transport = "gloo"

    def spoil(self, total: Tensor) -> Tensor:
        return total

    def all_reduce(self, x: Tensor) -> Tensor:
        others = sum(part(rank, SIZE, x.numel(), x.dtype, CPU) for rank in range(1, SIZE))
        return x.copy_(self.spoil(x + others))


class Lossy(Wire):
    def spoil(self, total: Tensor) -> Tensor:
        return total * (torch.arange(total.numel()) % SIZE != 2)


class Deaf(Wire):
    def all_reduce(self, x: Tensor) -> Tensor:
        return x


class Late(Wire):
    """The last number is from before."""

    def spoil(self, total: Tensor) -> Tensor:
        total[-1] = torch.nan
        return total


@pytest.mark.parametrize("ranks", range(2, MAX_RANKS + 1))
def test_every_way_that_ranks_take_is_tested(ranks: int) -> None:
    tested = {way_of(torch.empty(size // 2, dtype=torch.bfloat16), ranks) for size in SIZES}
    assert tested >= {way for _, way in next(WAYS[known] for known in sorted(WAYS) if known >= ranks)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_add_up_to_what_is_checked(dtype: torch.dtype) -> None:
    parts = [part(rank, 3, 1_000, dtype, CPU) for rank in range(3)]
    group = Wire()
    group.size = 3
    check(parts[0] + parts[1] + parts[2], group, 2_000)
    assert len(torch.stack(parts).sum(dim=0).unique()) == 64


@pytest.mark.parametrize(
    "wire, told",
    [
        (Lossy, r"^the parts of rank 2 did not arrive .* all-reduce of 4096 bytes by gloo gave 0 as element 2, not 1, and 256 of 1024 are"),
        (Deaf, r"^the parts of ranks 1, 2, 3 did not arrive .* gave 0 as element 1, not 1, and 768 of 1024 are wrong; GLOO_SOCKET_IFNAME"),
        (Late, r"^the parts of rank 3 did not arrive .* gave nan as element 1023, not 64, and 1 of 1024 are wrong"),
    ],
)
def test_a_wrong_sum_names_the_ranks_whose_parts_are_missing(wire: type[Wire], told: str) -> None:
    with pytest.raises(WrongSum, match=told):
        preflight(wire(), CPU)


def test_hints_are_those_of_the_transport() -> None:
    environment = {"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "WARN", "HOME": "/root", "GLOO_SOCKET_IFNAME": "lo"}
    nccl, peer, gloo = (hints(each, environment) for each in ("nccl", "peer memory and nccl", "testing sums by gloo"))
    assert "set is NCCL_DEBUG=WARN, NCCL_P2P_DISABLE=1" in nccl
    assert "NCCL_SHM_DISABLE=1" in nccl
    assert peer == f"--peer-memory false leaves all sums to NCCL; {nccl}"
    assert gloo == "GLOO_SOCKET_IFNAME, now lo, names the interface that reaches all ranks"


class Told(Supervisor):
    """A supervisor that is told what ranks would say."""

    def tell(self, rank: int, message: Loading | Ready) -> None:
        self._on_message(rank, message)


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Told]:
    settings = load(WorkerSettings, "worker", ["--model", str(tmp_path), "--preflight-deadline-s", "0.01"])
    told = Told(settings, WorkerMetrics(CollectorRegistry()).group("group-0", 2))
    yield told
    told.stop()


async def test_sums_that_do_not_end_are_the_cause_within_their_deadline(supervisor: Told) -> None:
    supervisor.tell(0, Loading(f"{TESTING}nccl", 0.0))
    with pytest.raises(GroupFailed, match=r"^testing sums by nccl did not end within preflight_deadline_s=0\.01: NCCL_DEBUG=INFO"):
        await asyncio.wait_for(supervisor.failed, 30)


async def test_tiles_of_another_triton_are_counted_and_no_disagreement(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    settings = load(WorkerSettings, "worker", ["--model", str(tmp_path), "--tensor-parallel-size", "2"])
    supervisor = Told(settings, WorkerMetrics(registry).group("group-0", 2))
    for rank, borrowed in ((0, 3), (1, 0)):
        supervisor.tell(rank, Ready(Facts(10, 100, 1000, (1,), borrowed), Memory(1, 2)))
    assert not supervisor.failed.done()
    assert registry.get_sample_value("lockstep_worker_borrowed_shapes", {"engine": "group-0"}) == 3
    supervisor.stop()


async def test_later_phases_may_take_longer(supervisor: Told) -> None:
    supervisor.tell(0, Loading(f"{TESTING}nccl", 0.0))
    assert supervisor.overdue(grace_s=-1) is not None
    supervisor.tell(0, Loading("loading weights", 0.0))
    assert supervisor.overdue(grace_s=-1) is None


def test_what_was_measured_is_told_in_the_metrics() -> None:
    sums = Sums((SumTime("nccl", 4, 1 << 20, 1e-3), SumTime("peer memory and nccl", 4, 4096, 4e-6)), fell_back=True)
    message = Ready(Facts(10, 100, 1000, (1,)), Memory(1, 2), sums)
    assert decode(encode(message)) == message
    registry = CollectorRegistry()
    WorkerMetrics(registry).group("group-0", 4).sums(sums)
    value = registry.get_sample_value
    labels = {"engine": "group-0", "transport": "nccl", "bytes": "1048576"}
    assert value("lockstep_worker_all_reduce_seconds", labels) == 1e-3
    assert value("lockstep_worker_all_reduce_bus_bytes_per_second", labels) == 1.5 * (1 << 20) / 1e-3
    assert value("lockstep_worker_peer_memory_fallbacks_total", {"engine": "group-0"}) == 1
