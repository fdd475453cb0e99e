"""Two groups of real ranks, each over two nodes that are workers of this host, and how each ends when one of its ranks does.

They start once, so the tests run in this order. That one node computes the same is seen where the whole stack runs: tests/e2e.
"""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from benchmarks.driver import Driver, admission, int32s, spec
from services.worker.distributed.preflight import CPU_SIZES
from services.worker.engine.engine import TorchEngine
from shared.protocol.plan import Plan, ids_from_bytes
from shared.rpc import StreamEnded
from tests.exposition import samples
from tests.services.worker.client import Execution, Worker, describe, execution, over_nodes
from tests.tiny import weightless_model

PAGES = 20  # of 4 tokens
LENGTH = 4 * PAGES  # room for the prompt and the bursts
PROMPT = [5, 6, 7, 300, 20]
SIZES = ("--page-size", "4", "--max-num-seqs", "4", "--max-model-len", str(LENGTH))
LEAST_PAGES = 60  # that one node has room for
PAGE_BYTES = 2 * 2 * 4 * 16 * 4  # of a rank: keys and values of 2 layers, 4 tokens, one head of 16 numbers in float32


class Running:
    """The workers of a group of random weights, half of its ranks each; the deviation tells models apart."""

    def __init__(self, folder: Path, deviation: float, ranks: int, step_deadline_s: float, gather: str) -> None:
        self.model = weightless_model(folder / "model", initializer_range=deviation)
        deadline = ("--step-deadline-s", str(step_deadline_s))
        tensor_parallel = ("--tensor-parallel-size", str(ranks), "--threads", "1")
        weights = ("--load-format", "random", "--sampling-gather", gather)
        arguments = ("--model", str(self.model), *weights, *tensor_parallel, *SIZES, *deadline)
        self.workers = over_nodes(folder, 2, *arguments, last=("--kv-cache-memory-bytes", str(LEAST_PAGES * PAGE_BYTES)))

    def ranks(self) -> list[psutil.Process]:
        return [rank for worker in self.workers for rank in worker.ranks()]

    async def end_with(self, message: str) -> None:
        """Both workers, with the same cause as their last words."""
        for worker in self.workers:
            assert await worker.ended(30) == 1
            assert re.search(message, worker.last_line)
            assert "Traceback" not in worker.log

    @asynccontextmanager
    async def execution(self, stream: int) -> AsyncIterator[Execution]:
        leader = self.workers[0]
        await leader.ready()
        async with execution(leader.port, stream=stream) as opened:
            yield opened

    def expected(self, bursts: int) -> list[int]:
        """The tokens of a group of one."""
        driver = Driver(TorchEngine(spec(self.model, load_format="random"), lambda phase, part: None), 4, PAGES)
        return [driver.prefill(0, PROMPT, flags=1), *(token for (token,) in driver.decode(0, iterations=8 * bursts))]


def prefill(plan_id: int = 1, **sampling: float) -> Plan:
    pages = np.arange(PAGES, dtype=np.int32)
    return Plan(
        plan_id,
        prefill_slots=int32s(0),
        prefill_starts=int32s(0),
        prefill_lengths=int32s(len(PROMPT)),
        prefill_flags=int32s(1),
        prefill_ids=int32s(*PROMPT),
        admissions=admission(0, LENGTH, flags=1, epoch=1, **sampling),
        grant_slots=np.zeros_like(pages),
        grant_indexes=pages,
        grant_pages=pages + 1,
    )


def burst(plan_id: int) -> Plan:
    return Plan(plan_id, iterations=8, decode_slots=int32s(0), decode_flags=int32s(1))


async def tokens(stream: Execution, bursts: int) -> list[int]:
    for plan in (prefill(), *(burst(2 + number) for number in range(bursts))):
        plan.estimate_us = 3_000_000  # however short the deadline of a step is: the other group computes beside this one
        stream.send(plan)
    return [token for _ in range(1 + bursts) for token in ids_from_bytes((await stream.result()).ids).tolist()]


async def ended(stream: Execution) -> None:
    while True:
        await stream.result()


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Running]]:
    """Of four ranks and of two, started at once."""
    started = (
        Running(tmp_path_factory.mktemp("four"), 0.2, 4, step_deadline_s=30, gather="candidates"),
        Running(tmp_path_factory.mktemp("two"), 0.3, 2, step_deadline_s=1.5, gather="full"),
    )
    yield started
    for worker in (worker for group in started for worker in group.workers):
        worker.clean_up()


async def test_tp_09_two_groups_on_one_host_answer_for_themselves(groups: tuple[Running, Running]) -> None:
    four, two = groups
    async with four.execution(1) as first, two.execution(1) as second:
        answers = await asyncio.gather(tokens(first, 3), tokens(second, 3))
    assert list(answers) == [four.expected(3), two.expected(3)]
    assert answers[0] != answers[1]


async def test_each_node_tells_of_itself(groups: tuple[Running, Running]) -> None:
    leader, follower = groups[0].workers
    values = []
    for worker in (leader, follower):
        async with httpx.AsyncClient(base_url=worker.admin_url, trust_env=False, verify=False) as client:
            assert (await client.get("/livez")).status_code == (await client.get("/readyz")).status_code == 200
            values.append(samples(await client.get("/metrics")))
    for rank in range(4):
        resident = f"lockstep_worker_rank_resident_memory_bytes{{engine=group-0,rank={rank}}}"
        assert [resident in each for each in values] == [rank < 2, rank >= 2]
    assert "lockstep_worker_startup_seconds{engine=group-0,phase=starting ranks}" in values[1]
    assert [each.get("lockstep_worker_ready{engine=group-0}") for each in values] == [1, None]  # the leader speaks for the group


async def test_a_group_has_as_many_pages_as_its_least_node(groups: tuple[Running, Running]) -> None:
    for group in groups:
        assert (await describe(await group.workers[0].ready())).pages == LEAST_PAGES


async def test_rows_that_no_candidates_can_stand_for_are_counted(groups: tuple[Running, Running]) -> None:
    four, _ = groups
    async with four.execution(2) as stream:
        for plan_id, sampling in enumerate(({"top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 5}), 1):
            stream.send(prefill(plan_id, **sampling))
            await stream.result()
    async with httpx.AsyncClient(base_url=four.workers[0].admin_url, trust_env=False, verify=False) as client:
        metrics = (await client.get("/metrics")).text
    assert 'lockstep_worker_rows_gathered_total{engine="group-0"} 1.0' in metrics
    for size in CPU_SIZES:
        assert f'lockstep_worker_all_reduce_seconds{{bytes="{size}",engine="group-0",transport="gloo"}}' in metrics
    assert four.workers[0].log.count("sums over 4 ranks by gloo are right") == 1
    assert sum(worker.log.count("such rows gather all logits") for worker in four.workers) == 4  # once a rank


async def test_tp_07_a_rank_killed_while_others_add_up_is_named(groups: tuple[Running, Running]) -> None:
    four, two = groups
    ranks = four.ranks()
    async with four.execution(3) as stream:
        ranks[2].send_signal(signal.SIGSTOP)
        stream.send(prefill())
        result = asyncio.create_task(stream.result())
        assert not (await asyncio.wait({result}, timeout=0.5))[0]  # so the others wait in the first all-reduce
        ranks[2].kill()
        with pytest.raises(StreamEnded, match=r"rank 2 \(node 1\) ended by SIGKILL"):
            await result
    await four.end_with(r"rank 2 \(node 1\) ended by SIGKILL")
    assert not psutil.wait_procs(ranks, timeout=30)[1]
    async with two.execution(2) as stream:  # the neighbour goes on
        assert await tokens(stream, 1) == two.expected(1)


async def test_tp_07_a_rank_stopped_in_the_middle_of_a_step_is_named_at_the_deadline(groups: tuple[Running, Running]) -> None:
    _, two = groups
    ranks = two.ranks()
    async with two.execution(3) as stream:
        stream.send(prefill())
        for number in range(7):
            stream.send(burst(2 + number))
        await stream.result()
        ranks[1].send_signal(signal.SIGSTOP)
        stream.send(burst(9))  # all before may have been computed
        stalled = r"did not finish plan \d+ within 1\.5 s: rank 1 \(node 1\) .*\(stopped by a signal\); rank 0 \(node 0\) in all_"
        with pytest.raises(StreamEnded, match=stalled):
            await ended(stream)
    await two.end_with(stalled)
    assert not psutil.wait_procs(ranks, timeout=30)[1]


async def test_tp_09_a_killed_instance_leaves_nothing_that_stops_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))  # where the groups' private folders are
    model = weightless_model(tmp_path / "model")
    (tmp_path / "script.json").write_text(json.dumps({}))
    arguments = ("--model", str(model), "--engine", "scripted", "--script", str(tmp_path / "script.json"), "--tensor-parallel-size", "2")
    first = Worker(tmp_path, *arguments)
    await first.ready()
    first.process.kill()
    first.process.wait()
    assert list(scratch.iterdir())
    first.ports_file.unlink()
    second = Worker(tmp_path, *arguments)
    await second.ready()
    second.process.terminate()
    assert await second.ended(30) == 0


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        (("--start-deadline-s", "1"), 1, r"not ready within start_deadline_s=1: (starting ranks|loading weights): ranks 0 and 1 starting"),
        (
            ("--start-deadline-s", "1", "--nodes", "2", "--leader-address", "127.0.0.1"),
            1,
            r"within start_deadline_s=1: waiting for node 1: ranks 0 \(node 0\) and 1 \(node 1\) starting",
        ),
    ],
)
async def test_a_group_that_cannot_start_says_why(tmp_path: Path, arguments: tuple[str, ...], status: int, message: str) -> None:
    model = weightless_model(tmp_path / "model")
    (tmp_path / "script.json").write_text(json.dumps({"load_s": 60}))
    script = ("--engine", "scripted", "--script", str(tmp_path / "script.json"), "--tensor-parallel-size", "2")
    worker = Worker(tmp_path, "--model", str(model), *script, *arguments)
    assert await worker.ended(30) == status
    assert re.search(message, worker.last_line)
    assert "Traceback" not in worker.log
