"""Tensor parallelism between two GPUs: what NCCL does in graphs, what two ranks compute, and how a group starts and ends."""

import asyncio
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from services.local import LLM, Completion, Sampling
from services.worker.distributed.collectives import Collectives
from services.worker.distributed.pynccl import NcclCommunicator
from services.worker.distributed.sums import TESTING
from services.worker.distributed.torch_group import ControlGroup, TorchCommunicator
from shared.rpc import StreamEnded
from tests.gpu.ranks import run
from tests.gpu.test_models import RELATIVE, SHORT_AND_LONG, Checkpoint, check_float32, prompts, spec
from tests.gpu.test_services import SETTINGS, check_equal, model
from tests.gpu.test_services import prompts as many_prompts
from tests.services.worker.client import Worker, describe, execution
from tests.services.worker.distributed.test_groups import SIZES, burst, ended, prefill, tokens
from tests.services.worker.models.group import Group, Job, Local
from tests.tiny import weightless_model

__all__ = ["model"]  # a fixture
pytestmark = pytest.mark.gpus(2)

# One of each; tests/gpu/test_models.py has all variants, on one GPU.
FAMILIES = ("llama-biased", "qwen2", "qwen3", "qwen3-moe", "mistral", "mistral3", "mixtral", "ministral3")
RESTARTS = 10
START_S = 200.0  # the first one compiles
BURSTS = 3


def collectives_in_a_graph(control: ControlGroup, device: torch.device, kind: str) -> None:
    group: Collectives = NcclCommunicator(control, device) if kind == "pynccl" else TorchCommunicator(control, device, 60.0)
    x = torch.zeros(4, 64, dtype=torch.bfloat16, device=device)

    def launch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total = group.all_reduce(x + group.rank)
        gathered = group.all_gather(x * 2 + group.rank)
        return total, gathered, group.broadcast(x + 10 * group.rank, source=1)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total, gathered, sent = launch()
    for value in (3.0, 5.0, 7.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(total, torch.full_like(total, 2 * value + 1))
        assert torch.equal(gathered, torch.cat([torch.full_like(x, 2 * value + rank) for rank in range(2)], dim=1))
        assert torch.equal(sent, torch.full_like(sent, value + 10))


@pytest.mark.parametrize("kind", ["torch", "pynccl"])
def test_nccl_collectives_run_in_a_graph_between_gpus(tmp_path: Path, kind: str) -> None:
    run(collectives_in_a_graph, tmp_path, (0, 1), kind)


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Group | Local]]:
    """By ranks: one in this process, and two with a GPU each, which add up as they do by default."""
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    made: dict[int, Group | Local] = {1: Local(), 2: Group(2, tmp_path_factory.mktemp("group"), "cuda", "auto")}
    yield made
    for each in made.values():
        each.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_logits_of_two_gpus_equal_transformers(checkpoint: Checkpoint, groups: dict[int, Any], name: str) -> None:
    for asked, count, chunk in ((SHORT_AND_LONG, 16, 1000), (prompts(300, 31), 2, 16)):
        outcome, other = groups[2].run(Job(checkpoint(name), asked, count, chunk, spec=spec()))
        assert (outcome.tokens == other.tokens).all()
        check_float32(checkpoint(name), asked, outcome)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_logits_of_two_gpus_are_near_those_of_one(smooth_checkpoint: Checkpoint, groups: dict[int, Any], name: str) -> None:
    """Greedy tokens are equal up to the first place where the two likeliest are nearer than the two runs are."""
    job = Job(smooth_checkpoint(name), SHORT_AND_LONG, 16, spec=spec(dtype="bfloat16"))
    (alone,) = groups[1].run(job)
    both, other = groups[2].run(job)
    assert (both.tokens == other.tokens).all()
    worst = 0.0
    for ours, theirs, logits, expected in zip(both.tokens, alone.tokens, both.logits, alone.logits, strict=True):
        for place, (token, other_token) in enumerate(zip(ours.tolist(), theirs.tolist(), strict=True)):
            error = np.linalg.norm(logits[place] - expected[place]) / np.linalg.norm(expected[place])
            worst = max(worst, float(error))
            if token != other_token:
                first, second = np.sort(expected[place])[-1:-3:-1]
                assert first - second <= RELATIVE * np.abs(expected[place]).max()
                break
    print(f"{name}: relative difference of bfloat16 logits between one GPU and two {worst:.1e}")
    assert worst < RELATIVE


WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "torch's NCCL": {"peer_memory": False},
    "PyNCCL": {"communicator": "pynccl", "peer_memory": False},
    "PyNCCL and peer memory": {"communicator": "pynccl"},
    "no graphs": {"cuda_graphs": False},
    "all logits are gathered": {"sampling_gather": "full"},
}


@pytest.fixture(scope="module")
def plain(model: Path) -> list[Completion]:
    """On one GPU, without graphs."""
    asked = many_prompts(40, 100, shared=64)
    with LLM(model, **{**SETTINGS, "cuda_graphs": False}, num_pages=4000) as llm:
        return llm.generate(asked, Sampling(24, ignore_eos=True, temperature=0))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
def test_two_gpus_give_the_tokens_of_one(model: Path, plain: list[Completion], way: str) -> None:
    asked = many_prompts(40, 100, shared=64)
    with LLM(model, **{**SETTINGS, **WAYS[way]}, tensor_parallel_size=2, num_pages=4000) as llm:
        first = llm.generate(asked, Sampling(24, ignore_eos=True, temperature=0))
        again = llm.generate(asked, Sampling(24, ignore_eos=True, temperature=0))
        seeded = [llm.generate(asked[:8], Sampling(24, ignore_eos=True, temperature=0.8, top_k=40, seed=7)) for _ in range(2)]
    check_equal(model, first, plain)
    check_equal(model, again, plain)
    assert all(np.array_equal(one.ids, other.ids) for one, other in zip(*seeded, strict=True))


def started(folder: Path, *arguments: str) -> Worker:
    folder.mkdir()
    model = weightless_model(folder / "model", initializer_range=0.3)
    gpus = ("--device", "cuda", "--dtype", "float32", "--tensor-parallel-size", "2", "--load-format", "random")
    return Worker(folder, "--model", str(model), *gpus, *SIZES, *arguments)


def options(way: str) -> list[str]:
    return [f"--{name.replace('_', '-')}={str(value).lower()}" for name, value in WAYS[way].items()]


@contextmanager
def ending(worker: Worker) -> Iterator[Worker]:
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()
        print(worker.log)


async def answer(worker: Worker) -> list[int]:
    await worker.ready(START_S)
    async with execution(worker.port) as stream:
        return await tokens(stream, BURSTS)


@pytest.mark.timeout(600)
def test_no_start_of_ten_hangs(tmp_path: Path) -> None:
    """Every way in turn, each ended without notice."""
    answers = set()
    for number in range(RESTARTS):
        with ending(started(tmp_path / str(number), *options(list(WAYS)[number % len(WAYS)]))) as worker:
            answers.add(tuple(asyncio.run(answer(worker))))
            ranks = worker.ranks()
        assert not psutil.wait_procs(ranks, timeout=10)[1], "ranks outlive their worker"
    assert len(answers) == 1


async def stalled(worker: Worker, number: int, told: str) -> list[psutil.Process]:
    """Sends a signal to rank 1 between a prefill and its decodes, and sees the group end; its ranks."""
    await worker.ready(START_S)
    ranks = worker.ranks()
    async with execution(worker.port) as stream:
        stream.send(prefill())
        await stream.result()
        ranks[1].send_signal(number)
        for plan in range(8):
            stream.send(burst(2 + plan))
        with pytest.raises(StreamEnded, match=told):
            await asyncio.wait_for(ended(stream), 30)
    assert await worker.ended(30) == 1
    return ranks


ENDS = {signal.SIGKILL: "rank 1 ended by SIGKILL", signal.SIGSTOP: r"within 3 s: rank 1 .*\(stopped by a signal\)"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", ENDS)
@pytest.mark.parametrize("way", ["as it comes", "torch's NCCL"])
def test_a_rank_that_is_killed_or_stopped_is_named(tmp_path: Path, way: str, number: signal.Signals) -> None:
    with ending(started(tmp_path / "worker", *options(way), "--step-deadline-s", "3")) as worker:
        ranks = asyncio.run(stalled(worker, number, ENDS[number]))
        assert re.search(ENDS[number], worker.last_line)
        assert not psutil.wait_procs(ranks, timeout=10)[1]


async def stopped_in_the_first_sums(worker: Worker) -> None:
    stub = await worker.loading(f"{TESTING}nccl")
    worker.ranks()[1].send_signal(signal.SIGSTOP)
    assert (await describe(stub)).phase.startswith(TESTING)
    assert await worker.ended(30) == 1


@pytest.mark.timeout(300)
def test_a_rank_that_is_stopped_in_the_first_sums_is_named(tmp_path: Path) -> None:
    with ending(started(tmp_path / "worker", "--preflight-deadline-s", "5")) as worker:
        asyncio.run(stopped_in_the_first_sums(worker))
        assert re.search(rf"{TESTING}.* did not end within preflight_deadline_s=5: rank 1 .*\(stopped by a signal\)", worker.last_line)
