"""The worker as its neighbours see it: a real process, real ranks, real gRPC; the engine plays a script."""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.driver import admission, int32s
from shared.protocol import execution_pb2 as pb
from shared.protocol.files import receive
from shared.protocol.plan import NO_FLAGS, NO_TOKEN, Plan, PlanFlag, ids_from_bytes
from shared.rpc import PROTOCOL_VERSION, StreamEnded
from tests.exposition import samples
from tests.services.worker.client import Execution, Worker, describe, execution, worker
from tests.tiny import weightless_model

PLAYED = [10, 11, 12, 13, 14, 15, 16, 17]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weightless_model(tmp_path_factory.mktemp("model"))


def start(folder: Path, model: Path, step_s: float = 0.0, ranks: int = 1, *arguments: str) -> Worker:
    script = folder / "script.json"
    script.write_text(json.dumps({"step_s": step_s, "default": {"ids": PLAYED, "repeat": True}}))
    sizes = ("--page-size", "4", "--max-num-seqs", "8", "--num-pages", "100", "--tensor-parallel-size", str(ranks))
    return Worker(folder, "--model", str(model), "--engine", "scripted", "--script", str(script), *sizes, *arguments)


@pytest.fixture(scope="module")
def shared_worker(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Worker]:
    running = start(tmp_path_factory.mktemp("worker"), model, 0.0, 2)
    yield running
    running.process.terminate()
    assert running.process.wait(30) == 0
    print(running.log)


def prefill(plan_id: int, slot: int = 0, flags: PlanFlag = NO_FLAGS, epoch: int = 1) -> Plan:
    return Plan(
        plan_id,
        flags=flags,
        prefill_slots=int32s(slot),
        prefill_starts=int32s(0),
        prefill_lengths=int32s(3),
        prefill_flags=int32s(1),
        prefill_ids=int32s(5, 6, 7),
        admissions=admission(slot, 200, epoch=epoch),
    )


def decode(plan_id: int, *slots: int, iterations: int = 1) -> Plan:
    return Plan(plan_id, iterations=iterations, decode_slots=int32s(*slots), decode_flags=int32s(*[1] * len(slots)))


def ids(result: pb.PlanResult) -> list[list[int]]:
    return ids_from_bytes(result.ids).reshape(result.iterations, -1).tolist()


async def queued_plans(running: Worker) -> float:
    """That are not launched in full."""
    async with httpx.AsyncClient(base_url=running.admin_url, trust_env=False, verify=False) as client:
        return samples(await client.get("/metrics"))["lockstep_worker_queued_plans{engine=group-0}"]


async def last_result_below(stream: Execution, plan_id: int) -> None:
    """Reads results, all of plans below `plan_id`, until the stream ends."""
    while True:
        assert (await stream.result()).plan < plan_id


_streams = iter(range(1, 10**6))


def next_stream() -> int:
    return next(_streams)


async def test_describe_and_files(shared_worker: Worker, model: Path) -> None:
    stub = await shared_worker.ready()
    group = await describe(stub)
    assert (group.name, group.tp, group.page_size, group.pages, group.slots) == ("group-0", 2, 4, 100, 8)
    assert (group.max_length, group.vocab_size, list(group.eos_ids)) == (256, 384, [2])
    assert len(group.fingerprint) == 64
    files = await receive(aiter(stub.Files(pb.ExecutionFilesRequest(group="group-0"))))
    assert {file.name: file.data for file in files} == {
        name: (model / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    }


async def test_plans_sent_ahead_run_in_order(shared_worker: Worker) -> None:
    await shared_worker.ready()
    async with execution(shared_worker.port, stream=next_stream()) as stream:
        stream.send(prefill(1, slot=3, epoch=9))
        for plan_id in range(2, 6):
            stream.send(decode(plan_id, 3, 4))
        results = [await stream.result() for _ in range(5)]
    assert [result.plan for result in results] == [1, 2, 3, 4, 5]
    assert [ids(result) for result in results] == [[[10]], *([[token, NO_TOKEN]] for token in PLAYED[1:5])]
    assert [ids_from_bytes(result.slot_epochs)[0] for result in results] == [9] * 5
    times = [(result.start_us, result.end_us) for result in results]
    assert times == sorted(times)
    assert all(result.hold_us >= result.end_us - result.start_us >= 0 for result in results)


async def test_a_burst_is_one_result(shared_worker: Worker) -> None:
    await shared_worker.ready()
    async with execution(shared_worker.port, stream=next_stream()) as stream:
        stream.send(prefill(1))
        stream.send(decode(2, 0, iterations=5))
        assert ids(await stream.result()) == [[10]]
        assert ids(await stream.result()) == [[token] for token in PLAYED[1:6]]


async def test_the_welcome_names_the_highest_slot_epoch_and_all_slots_are_reset(shared_worker: Worker) -> None:
    await shared_worker.ready()
    async with execution(shared_worker.port, stream=next_stream()) as stream:
        stream.send(prefill(1, slot=2, epoch=77))
        await stream.result()
    async with execution(shared_worker.port, stream=next_stream()) as stream:
        assert stream.welcome.highest_slot_epoch == 77
        stream.send(decode(2, 2))
        assert ids(await stream.result()) == [[NO_TOKEN]]


async def test_a_bad_plan_is_refused_and_never_executed(shared_worker: Worker) -> None:
    await shared_worker.ready()
    for bad, message in ((decode(2, 8), "decode slot must be from 0 to 7, got 8"), (b"\0" * 64, "plan version 0")):
        async with execution(shared_worker.port, stream=next_stream()) as stream:
            stream.send(prefill(1))
            await stream.result()
            stream.send(bad)
            with pytest.raises(StreamEnded, match=f"invalid_argument: .*{message}"):
                await stream.result()
    async with execution(shared_worker.port, stream=next_stream()) as stream:
        stream.send(prefill(1))
        assert ids(await stream.result()) == [[10]]


async def test_a_scheduler_that_ends_its_stream_says_why(shared_worker: Worker) -> None:
    await shared_worker.ready()
    number = next_stream()
    async with execution(shared_worker.port, stream=number) as stream:
        stream.outbox.put(pb.ExecutionExecuteRequest(goodbye=pb.ExecuteGoodbye(reason="too slow, \n" + "x" * 1_000)))
        async for message in stream.incoming:
            assert message.HasField("heartbeat")
    (line,) = (line for line in shared_worker.log.splitlines() if f"stream 1.{number}: the scheduler has ended it: too slow" in line)
    assert len(line) < 700


async def test_a_hello_must_be_above_the_highest_seen(shared_worker: Worker) -> None:
    await shared_worker.ready()
    number = next_stream()
    async with execution(shared_worker.port, stream=number):
        pass
    with pytest.raises(StreamEnded, match=f"failed_precondition: the highest seen is epoch 1, stream {number}"):
        async with execution(shared_worker.port, stream=number):
            pass


async def test_a_newer_stream_fences_the_older_and_discards_its_queue(tmp_path: Path, model: Path) -> None:
    running = start(tmp_path, model, 0.1)
    try:
        await running.ready()
        async with execution(running.port, epoch=1, stream=5) as old:
            old.send(prefill(1))
            for plan_id in range(2, 100):  # for ten seconds
                old.send(decode(plan_id, 0))
            await old.result()
            async with execution(running.port, epoch=2, stream=1) as new:
                new.send(prefill(1, slot=1, epoch=2))
                assert ids(await new.result()) == [[10]]
                with pytest.raises(StreamEnded, match="aborted: epoch 2, stream 1 has taken the group over"):
                    await last_result_below(old, 99)
    finally:
        running.process.terminate()
        running.process.wait(30)


async def test_a_jump_overtakes_what_is_not_launched(tmp_path: Path, model: Path) -> None:
    running = start(tmp_path, model)
    try:
        await running.ready()
        (rank,) = running.ranks()
        async with execution(running.port) as stream:
            rank.suspend()
            stream.send(prefill(1))
            for plan_id in range(2, 8):
                stream.send(decode(plan_id, 0, iterations=2))
            stream.send(prefill(8, slot=1, flags=PlanFlag.JUMP))
            async with asyncio.timeout(30):
                while await queued_plans(running) < 7:  # all have come, and the first is launched
                    await asyncio.sleep(0.01)
            rank.resume()
            order = [(await stream.result()).plan for _ in range(8)]
        assert order.index(8) <= 3
        assert [plan for plan in order if plan != 8] == list(range(1, 8))
    finally:
        running.process.terminate()
        running.process.wait(30)


async def test_another_protocol_is_refused_naming_both(shared_worker: Worker) -> None:
    stub = await shared_worker.ready()
    with pytest.raises(Exception, match=rf"speaks protocol 2\.0, we speak {PROTOCOL_VERSION}"):
        await stub.Describe(pb.ExecutionDescribeRequest(protocol_version="2.0"))


@pytest.mark.parametrize("rank", [0, 1, 2])
async def test_tp_07_a_killed_rank_ends_the_group_with_its_cause(tmp_path: Path, model: Path, rank: int) -> None:
    running = start(tmp_path, model, 0.01, 3)
    await running.ready()
    ranks = running.ranks()
    async with execution(running.port) as stream:
        stream.send(prefill(1))
        await stream.result()
        ranks[rank].kill()
        with pytest.raises(StreamEnded):
            await stream.result()
    assert await running.ended(30) == 1
    assert f"rank {rank} ended by SIGKILL" in running.last_line
    assert not psutil.wait_procs(ranks, timeout=30)[1]


async def test_tp_07_a_stopped_rank_is_noticed_at_the_step_deadline(tmp_path: Path, model: Path) -> None:
    running = start(tmp_path, model, 0.0, 1, "--step-deadline-s", "0.5")
    await running.ready()
    (rank,) = running.ranks()
    async with execution(running.port) as stream:
        rank.send_signal(signal.SIGSTOP)
        stream.send(prefill(1))
        with pytest.raises(StreamEnded):
            await stream.result()
    assert await running.ended(30) == 1
    assert "the ranks did not finish plan 1 within 0.5 s" in running.last_line
    assert not psutil.wait_procs([rank], timeout=30)[1]


async def test_a_long_step_is_no_stall(tmp_path: Path, model: Path) -> None:
    running = start(tmp_path, model, 1.2, 1, "--step-deadline-s", "0.3")
    try:
        await running.ready()
        async with execution(running.port) as stream:
            plan = prefill(1)
            plan.estimate_us = 1_000_000  # of which ten times may pass
            stream.send(plan)
            assert ids(await stream.result()) == [[10]]
    finally:
        running.process.terminate()
        assert running.process.wait(30) == 0


async def test_the_ranks_die_with_the_supervisor(tmp_path: Path, model: Path) -> None:
    running = start(tmp_path, model, 0.0, 2)
    await running.ready()
    ranks = running.ranks()
    running.process.kill()
    assert not psutil.wait_procs(ranks, timeout=30)[1]
    running.process.wait(30)


async def test_mod_06_not_ready_while_loading(tmp_path: Path, model: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"load_s": 1.0}))
    with worker(tmp_path, "--model", str(model), "--engine", "scripted", "--script", str(script)) as running:
        async with asyncio.timeout(30):
            while not running.ports_file.exists():
                await asyncio.sleep(0.01)
        with pytest.raises(StreamEnded, match=r"unavailable: group-0 is not ready: (starting ranks|loading weights)"):
            async with execution(running.port):
                pass
        await running.ready()
        async with execution(running.port):
            pass


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--model", "/nowhere"), "model: /nowhere is no folder"),
        (("--tensor-parallel-size", "0"), "tensor_parallel_size"),
        (("--page-size", "x"), "page_size"),
        (("--script", "/nowhere/script.json"), "script: /nowhere/script.json"),
    ],
)
async def test_mod_07_bad_configuration_is_one_line_and_status_2(
    tmp_path: Path, model: Path, arguments: tuple[str, ...], message: str
) -> None:
    running = Worker(tmp_path, "--model", str(model), "--engine", "scripted", *arguments)
    assert await running.ended(30) == 2
    assert message in running.last_line
    assert "Traceback" not in running.log


async def test_ranks_log_as_their_supervisor_does(tmp_path: Path, model: Path) -> None:
    flags = ("--script", "/nowhere/script.json", "--log-format", "json", "--log-level", "debug")
    running = Worker(tmp_path, "--model", str(model), "--engine", "scripted", *flags)
    assert await running.ended(30) == 2
    assert {"lockstep-worker", "rank-0"} == {json.loads(line)["service"] for line in running.log.splitlines()}


async def test_mod_07_a_port_in_use(tmp_path: Path, model: Path, shared_worker: Worker) -> None:
    await shared_worker.ready()
    running = Worker(tmp_path, "--model", str(model), "--engine", "scripted", "--port", str(shared_worker.port))
    assert await running.ended(30) == 1
    assert f"cannot listen on 127.0.0.1:{shared_worker.port}" in running.last_line


async def test_a_worker_that_may_take_years_to_drain_does_drain(tmp_path: Path, model: Path) -> None:
    running = start(tmp_path, model, 0.0, 1, "--drain-s", "1e9")
    try:
        await running.ready()
        async with execution(running.port) as stream:
            running.process.terminate()
            async for message in stream.incoming:
                if message.WhichOneof("message") == "draining":
                    break
        assert await running.ended(30) == 0
    finally:
        running.clean_up()
