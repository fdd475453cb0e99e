"""Collectives inside a CUDA graph, with a group of one rank: what can be seen of them on one GPU."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from services.worker.distributed.collectives import Collectives
from services.worker.distributed.pynccl import NcclCommunicator
from services.worker.distributed.torch_group import ControlGroup, HostCommunicator, TorchCommunicator

KINDS: dict[str, Callable[[ControlGroup, torch.device], Collectives]] = {
    "pynccl": NcclCommunicator,
    "torch": lambda control, device: TorchCommunicator(control, device, 60.0),
}


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlGroup]:
    folder: Path = tmp_path_factory.mktemp("rendezvous")
    torch.cuda.set_device(0)
    yield ControlGroup(0, 1, f"file://{folder / 'rendezvous'}", 60.0)
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_run_in_a_graph(control: ControlGroup, kind: str) -> None:
    group = KINDS[kind](control, torch.device("cuda", 0))
    x = torch.zeros(4, 64, dtype=torch.bfloat16, device="cuda")

    def collectives() -> torch.Tensor:
        return group.broadcast(group.all_gather(group.all_reduce(x + 1)) * 2)

    collectives()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = collectives()
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(out, torch.full_like(out, 2 * (value + 1)))
    assert out.shape == (4, 64)


def test_ranks_that_share_a_gpu_go_through_main_memory(control: ControlGroup) -> None:
    group = HostCommunicator(control, 60.0)
    x = torch.arange(6, dtype=torch.bfloat16, device="cuda").view(2, 3)
    assert torch.equal(group.all_reduce(x.clone()), x)
    assert torch.equal(group.all_gather(x), x)
    assert torch.equal(group.broadcast(x.clone()), x)
    assert group.minimum(7) == 7
