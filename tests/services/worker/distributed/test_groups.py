"""Two groups of real ranks on one host, side by side, and how each ends when one of its ranks does (in this order: they start once)."""

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
from services.worker.engine.engine import TorchEngine
from shared.protocol.plan import Plan, ids_from_bytes
from shared.rpc import StreamEnded
from tests.services.worker.client import Execution, Worker, execution
from tests.tiny import weightless_model

PAGES = 20  # of 4 tokens
LENGTH = 4 * PAGES  # room for the prompt and the bursts
PROMPT = [5, 6, 7, 300, 20]
SIZES = ("--page-size", "4", "--num-pages", "100", "--max-num-seqs", "4", "--max-model-len", str(LENGTH))


class Running:
    """A worker of random weights; the deviation tells models apart."""

    def __init__(self, folder: Path, deviation: float, ranks: int, step_deadline_s: float, gather: str) -> None:
        self.model = weightless_model(folder / "model", initializer_range=deviation)
        deadline = ("--step-deadline-s", str(step_deadline_s))
        tensor_parallel = ("--tensor-parallel-size", str(ranks), "--threads", "1")
        weights = ("--load-format", "random", "--sampling-gather", gather)
        self.worker = Worker(folder, "--model", str(self.model), *weights, *tensor_parallel, *SIZES, *deadline)

    @asynccontextmanager
    async def execution(self, stream: int) -> AsyncIterator[Execution]:
        await self.worker.ready()
        async with execution(self.worker.port, stream=stream) as opened:
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
    stream.send(prefill())
    for number in range(bursts):
        stream.send(burst(2 + number))
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
    for group in started:
        group.worker.process.kill()
        group.worker.process.wait()
        print(group.worker.log)


async def test_tp_09_two_groups_on_one_host_answer_for_themselves(groups: tuple[Running, Running]) -> None:
    four, two = groups
    async with four.execution(1) as first, two.execution(1) as second:
        answers = await asyncio.gather(tokens(first, 3), tokens(second, 3))
    assert list(answers) == [four.expected(3), two.expected(3)]
    assert answers[0] != answers[1]


async def test_rows_that_no_candidates_can_stand_for_are_counted(groups: tuple[Running, Running]) -> None:
    four, _ = groups
    async with four.execution(2) as stream:
        for plan_id, sampling in enumerate(({"top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 5}), 1):
            stream.send(prefill(plan_id, **sampling))
            await stream.result()
    async with httpx.AsyncClient(base_url=four.worker.admin_url, trust_env=False) as client:
        assert 'lockstep_worker_rows_gathered_total{engine="group-0"} 1.0' in (await client.get("/metrics")).text
    assert four.worker.log.count("such rows gather all logits") == 4  # once a rank


async def test_tp_07_a_rank_killed_while_others_add_up_is_named(groups: tuple[Running, Running]) -> None:
    four, two = groups
    ranks = four.worker.ranks()
    async with four.execution(3) as stream:
        ranks[2].send_signal(signal.SIGSTOP)
        stream.send(prefill())
        result = asyncio.create_task(stream.result())
        assert not (await asyncio.wait({result}, timeout=0.5))[0]  # so the others wait in the first all-reduce
        ranks[2].kill()
        with pytest.raises(StreamEnded, match="rank 2 ended by SIGKILL"):
            await result
    assert await four.worker.ended(10) == 1
    assert "rank 2 ended by SIGKILL" in four.worker.last_line
    assert "Traceback" not in four.worker.log
    assert not psutil.wait_procs(ranks, timeout=2)[1]
    async with two.execution(2) as stream:  # the neighbour goes on
        assert await tokens(stream, 1) == two.expected(1)


async def test_tp_07_a_rank_stopped_in_the_middle_of_a_step_is_named_at_the_deadline(groups: tuple[Running, Running]) -> None:
    _, two = groups
    ranks = two.worker.ranks()
    async with two.execution(3) as stream:
        stream.send(prefill())
        for number in range(8):
            stream.send(burst(2 + number))
        await stream.result()
        ranks[1].send_signal(signal.SIGSTOP)
        with pytest.raises(StreamEnded, match=r"did not finish plan \d+ within 1\.5 s: rank 1 .*\(stopped by a signal\); rank 0 in all_"):
            await ended(stream)
    assert await two.worker.ended(10) == 1
    assert "(stopped by a signal); rank 0 in all_" in two.worker.last_line
    assert not psutil.wait_procs(ranks, timeout=2)[1]


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
    assert await second.ended(10) == 0


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        (("--start-deadline-s", "1"), 1, r"not ready within start_deadline_s=1: (starting ranks|loading weights): ranks 0 and 1 starting"),
        (("--nodes", "2", "--leader-address", "127.0.0.1"), 2, r"nodes: 2: plans reach the ranks of one node only"),
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
