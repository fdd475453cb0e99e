"""Simulated groups as a scheduler sees them: the worker's own process and gRPC, exact times, checkable tokens, faults on demand."""

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import grpc
import numpy as np
import pytest

from benchmarks.driver import admission, int32s
from services.worker.engine.roofline import GPUS, MODELS, Roofline
from services.worker.engine.simulated import Language
from shared.protocol import execution_pb2 as pb
from shared.protocol.execution_pb2_grpc import ExecutionStub
from shared.protocol.logprobs import logprobs_from_bytes
from shared.protocol.plan import FAILED_ROW, Plan, PlanFlag, RowFlag, SlotFlag, ids_from_bytes
from shared.rpc import PROTOCOL_VERSION, StreamEnded
from tests.services.worker.client import Execution, Worker, execution, worker
from tests.tiny import VOCAB_SIZE, weightless_model

SIZES = ("--page-size", "4", "--max-num-seqs", "8", "--num-pages", "100", "--simulated-gpu", "h200", "--simulated-model", "0.6b")
LANGUAGE = Language(VOCAB_SIZE, (2,))
ROOFLINE = Roofline(GPUS["h200"], MODELS["0.6b"], ranks=2)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without weights: a simulation needs none."""
    folder = weightless_model(tmp_path_factory.mktemp("model"))
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Worker]:
    faults = json.dumps([{"kind": "crash", "step": 3, "group": "sim-3"}])
    ranks = ("--tensor-parallel-size", str(ROOFLINE.ranks))
    arguments = (*ranks, "--model", str(model), "--engine", "simulated", "--groups", "4", "--group", "sim", "--simulated-faults", faults)
    with worker(tmp_path_factory.mktemp("worker"), *arguments, *SIZES) as running:
        yield running


async def groups(running: Worker) -> list[pb.WorkerGroup]:
    """Once all are ready."""
    async with asyncio.timeout(30):
        while not running.ports_file.exists():
            assert running.process.poll() is None, running.log
            await asyncio.sleep(0.02)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
            while True:
                response = await ExecutionStub(channel).Describe(pb.ExecutionDescribeRequest(protocol_version=PROTOCOL_VERSION))
                if all(group.ready for group in response.groups):
                    return list(response.groups)
                await asyncio.sleep(0.02)


def prefill(plan_id: int, slot: int = 0, prompt: list[int] = PROMPT, jump: bool = False, epoch: int = 1) -> Plan:
    pages = 8
    return Plan(
        plan_id,
        flags=PlanFlag.JUMP if jump else PlanFlag(0),
        prefill_slots=int32s(slot),
        prefill_starts=int32s(0),
        prefill_lengths=int32s(len(prompt)),
        prefill_flags=int32s(1),
        prefill_ids=int32s(*prompt),
        grant_slots=int32s(*[slot] * pages),
        grant_indexes=int32s(*range(pages)),
        grant_pages=int32s(*range(1 + slot * pages, 1 + (slot + 1) * pages)),
        admissions=admission(slot, 32, epoch=epoch),
    )


def decode(plan_id: int, *slots: int, iterations: int = 1) -> Plan:
    return Plan(plan_id, iterations=iterations, decode_slots=int32s(*slots), decode_flags=int32s(*[1] * len(slots)))


async def results(stream: Execution, count: int) -> list[pb.PlanResult]:
    async with asyncio.timeout(30):
        return [await stream.result() for _ in range(count)]


def tokens(answers: list[pb.PlanResult]) -> list[int]:
    return [token for answer in answers for token in ids_from_bytes(answer.ids).tolist()]


async def test_one_process_describes_all_groups(four: Worker, model: Path) -> None:
    described = await groups(four)
    assert [group.name for group in described] == ["sim-0", "sim-1", "sim-2", "sim-3"]
    assert len({group.fingerprint for group in described}) == 1
    assert {(group.slots, group.pages, group.vocab_size) for group in described} == {(8, 100, VOCAB_SIZE)}
    assert not four.ranks()  # no processes beside the supervisors'


async def test_groups_compute_side_by_side_what_the_ids_say(four: Worker) -> None:
    await groups(four)
    prompts = [[number + 3, 9, 11] for number in range(3)]

    async def complete(number: int) -> list[int]:
        async with execution(four.port, stream=1, group=f"sim-{number}") as stream:
            stream.send(prefill(1, prompt=prompts[number]))
            stream.send(decode(2, 0))
            stream.send(decode(3, 0, iterations=4))
            return tokens(await results(stream, 3))

    answers = await asyncio.gather(*(complete(number) for number in range(3)))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = LANGUAGE.completion(prompt, 6)
        assert answer[: len(expected)] == expected
        assert set(answer[len(expected) :]) <= {-1}
    assert len({tuple(answer) for answer in answers}) == 3


async def test_steps_take_what_the_roofline_says(four: Worker) -> None:
    await groups(four)
    async with execution(four.port, stream=2, group="sim-0") as stream:
        stream.send(prefill(1))
        for plan_id in range(2, 22):
            stream.send(decode(plan_id, 0))
        answers = await results(stream, 21)
    for before, after in pairwise(answers):
        assert after.start_us - before.end_us == after.idle_us  # 0, unless its plan came later than that
    step_us = ROOFLINE.step_us(1, 1, 4, 4)
    assert all(abs(answer.end_us - answer.start_us - step_us) <= 2 for answer in answers[1:])


async def test_jumps_alternate_with_what_they_overtake(four: Worker) -> None:
    await groups(four)
    async with execution(four.port, stream=3, group="sim-1") as stream:
        stream.send(prefill(1))
        for plan_id in range(2, 80):  # 0.6 s, in which the jumps get here however busy the machine is
            stream.send(decode(plan_id, 0, iterations=8))
        for slot in (1, 2, 3):
            stream.send(prefill(80 + slot, slot, jump=True))
        answers = sorted(await results(stream, 82), key=lambda answer: answer.start_us)
    order = [answer.plan for answer in answers]
    assert [plan for plan in order if plan < 80] == list(range(1, 80))
    assert [plan for plan in order if plan > 80] == [81, 82, 83]
    assert order.index(81) < 79
    starts = {answer.plan: answer.start_us for answer in answers}
    ends = {answer.plan: answer.end_us for answer in answers}
    step_us = ROOFLINE.step_us(1, 1, 4, 4)
    for first, second in ((81, 82), (82, 83)):
        assert starts[second] - ends[first] >= 0.9 * step_us  # a decode iteration lies between them


async def test_a_prefix_that_another_slot_has_written_counts(four: Worker) -> None:
    await groups(four)
    prompt = [4, 8, 15, 16, 23, 42]
    async with execution(four.port, stream=4, group="sim-2") as stream:
        stream.send(prefill(1, 0, prompt))
        shared = Plan(
            2,
            prefill_slots=int32s(1),
            prefill_starts=int32s(4),
            prefill_lengths=int32s(2),
            prefill_flags=int32s(1),
            prefill_ids=int32s(*prompt[4:]),
            grant_slots=int32s(1, 1),
            grant_indexes=int32s(0, 1),
            grant_pages=int32s(1, 50),
            admissions=admission(1, 32),
        )
        stream.send(shared)
        first, second = tokens(await results(stream, 2))
    assert first == second == LANGUAGE.completion(prompt, 1)[0]


async def test_a_group_that_crashes_starts_anew_and_the_others_go_on(four: Worker) -> None:
    await groups(four)
    async with execution(four.port, stream=5, group="sim-3") as stream, execution(four.port, stream=5, group="sim-0") as other:
        stream.send(prefill(1))
        for plan_id in range(2, 5):
            stream.send(decode(plan_id, 0))
        with pytest.raises(StreamEnded, match="a simulated crash"):
            await results(stream, 4)
        other.send(prefill(1))
        assert tokens(await results(other, 1)) == LANGUAGE.completion(PROMPT, 1)
    await groups(four)
    async with execution(four.port, stream=6, group="sim-3") as stream:
        stream.send(prefill(1))
        assert tokens(await results(stream, 1)) == LANGUAGE.completion(PROMPT, 1)


async def test_alone_a_crash_is_the_end_of_the_process(tmp_path: Path, model: Path) -> None:
    faults = json.dumps([{"kind": "crash", "step": 2}])
    running = Worker(tmp_path, "--model", str(model), "--engine", "simulated", "--simulated-faults", faults, *SIZES)
    await groups(running)
    async with execution(running.port) as stream:
        stream.send(prefill(1))
        stream.send(decode(2, 0))
        with pytest.raises(StreamEnded):
            await results(stream, 2)
    assert await running.ended(30) == 1
    assert "a simulated crash" in running.last_line


async def test_delays_failed_rows_and_stalls(tmp_path: Path, model: Path) -> None:
    faults = [{"kind": "delay", "step": 2, "seconds": 0.2}, {"kind": "error", "step": 3}, {"kind": "stall", "step": 5}]
    sizes = (*SIZES, "--step-deadline-s", "1")
    running = Worker(tmp_path, "--model", str(model), "--engine", "simulated", "--simulated-faults", json.dumps(faults), *sizes)
    await groups(running)
    async with execution(running.port) as stream:
        stream.send(prefill(1))
        for plan_id in range(2, 6):
            stream.send(decode(plan_id, 0))
        _, late, failed, after = await results(stream, 4)
        assert late.end_us - late.start_us >= 200_000
        assert (failed.start_us, after.start_us) == (late.end_us, failed.end_us)  # exactly, however late this process runs
        assert tokens([failed, after]) == [FAILED_ROW, -1]
        with pytest.raises(StreamEnded):
            await stream.result()
    assert await running.ended(30) == 1
    assert "the ranks did not finish plan 5 within 1 s" in running.last_line


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--engine", "scripted", "--groups", "2"), "groups=2 needs engine=simulated"),
        (("--engine", "simulated", "--simulated-model", "405b"), "simulated_model"),
        (("--engine", "simulated", "--simulated-faults", '[{"kind": "delay"}]'), "give either step or probability"),
    ],
)
async def test_bad_settings_are_named(tmp_path: Path, model: Path, arguments: tuple[str, ...], message: str) -> None:
    running = Worker(tmp_path, "--model", str(model), *arguments)
    assert await running.ended(30) == 2
    assert message in running.last_line


def test_a_completion_depends_on_every_id_and_ends_now_and_then() -> None:
    assert LANGUAGE.completion([1, 2, 3], 20, ignore_eos=True) != LANGUAGE.completion([2, 1, 3], 20, ignore_eos=True)
    lengths = [len(LANGUAGE.completion([number], 3_000)) for number in range(60)]
    assert 150 < np.mean(lengths) < 600
    assert all(2 not in LANGUAGE.completion([number], 400, ignore_eos=True) for number in range(5))
    assert all(len(LANGUAGE.completion([number], 400, min_tokens=50)) > 50 for number in range(5))


async def test_rows_that_want_log_probabilities_get_them_beside_rows_that_do_not(four: Worker) -> None:
    await groups(four)
    async with execution(four.port, epoch=40, group="sim-1") as stream:
        plan = prefill(1)
        plan.admissions["flags"] |= SlotFlag.LOGPROBS | SlotFlag.IGNORE_EOS
        plan.prefill_flags |= RowFlag.SCORE
        for each in (plan, prefill(2, slot=1), decode(3, 0, 1, iterations=2)):
            stream.send(each)
        first, second, burst = await results(stream, 3)
    records = logprobs_from_bytes(first.logprobs)
    assert records["position"].tolist() == [len(PROMPT), *range(1, len(PROMPT))]
    assert records["top_ids"][0, 0] == ids_from_bytes(first.ids)[0]
    assert records["top_ids"][1:, 0].tolist() == PROMPT[1:]
    assert not second.logprobs
    assert [(each["row"], each["position"]) for each in logprobs_from_bytes(burst.logprobs)] == [(0, len(PROMPT) + 1), (0, len(PROMPT) + 2)]
