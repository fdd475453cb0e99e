"""The whole scheduler over real gRPC, between a session of a gateway and the service of a worker."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from services.scheduler import health, stream
from services.scheduler.__main__ import serve
from services.scheduler.connection import MAX_GROUPS
from services.scheduler.health import MAX_FAILURES
from services.scheduler.history import History
from services.scheduler.leadership import Leadership, NoLease, SteppedDown
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.server import GenerationService
from services.scheduler.settings import SchedulerSettings
from services.scheduler.stream import MAX_PAGES
from shared.ports import port_of, reserve
from shared.protocol import execution_pb2, files
from shared.protocol import generation_pb2 as pb
from shared.protocol.generation_pb2_grpc import GenerationStub, add_GenerationServicer_to_server
from shared.protocol.submits import MAX_SUBMITS
from shared.rpc import PROTOCOL_VERSION, SERVER_OPTIONS, StreamEnded, channel, start_server
from shared.settings import load
from tests.certificates import write_certificates
from tests.exposition import samples
from tests.processes import eventually_async
from tests.services.scheduler.device import EOS, next_token
from tests.services.scheduler.scripted_worker import FILES, LIMITS, ScriptedWorker, serving
from tests.services.scheduler.session_client import Answer, session, submit

ONE_SLOT = replace(LIMITS, slots=1)


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < max_tokens and (not ids or ids[-1] != EOS):
        ids.append(next_token(prompt + ids, LIMITS.vocab_size))
    return ids


@contextlib.asynccontextmanager
async def scheduling(
    folder: Path, *workers: ScriptedWorker, ready: bool = True, ends_by_itself: bool = False, **settings: Any
) -> AsyncIterator[str]:
    """A scheduler in this process; yields its address once it is ready. It is told to stop, unless it `ends_by_itself`, and waited for."""
    ports_file = folder / "ports.json"
    targets = [f"127.0.0.1:{worker.port}" for worker in workers]
    stop = asyncio.Event()
    service = asyncio.create_task(serve(SchedulerSettings(port=0, admin_port=0, worker=targets, ports_file=ports_file, **settings), stop))
    try:
        async with asyncio.timeout(30):
            while not ports_file.exists():
                assert not service.done(), service.exception()
                await asyncio.sleep(0.005)
            target = f"127.0.0.1:{json.loads(ports_file.read_text())['grpc']}"
            while ready and await serving_status(target) != health_pb2.HealthCheckResponse.SERVING:
                await asyncio.sleep(0.01)
        yield target
    finally:
        if not ends_by_itself:
            stop.set()
        await service


async def metrics(folder: Path) -> dict[str, float]:
    port = json.loads((folder / "ports.json").read_text())["admin"]
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        return samples(await client.get(f"http://127.0.0.1:{port}/metrics"))


async def debug_page(folder: Path, name: str) -> Any:
    port = json.loads((folder / "ports.json").read_text())["admin"]
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        answer = await client.get(f"http://127.0.0.1:{port}/debug/{name}")
    assert answer.headers["content-type"] == "application/json"
    return answer.raise_for_status().json()


async def groups_ready(folder: Path, number: int) -> None:
    async with asyncio.timeout(30):
        while len((await debug_page(folder, "groups"))["groups"]) < number:
            await asyncio.sleep(0.01)


async def serving_status(target: str) -> Any:
    async with channel(target) as opened:
        return (await health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)).status


async def describe(target: str) -> pb.GenerationDescribeResponse:
    async with channel(target) as opened:
        return await GenerationStub(opened).Describe(pb.GenerationDescribeRequest(protocol_version=PROTOCOL_VERSION))


async def test_requests_are_answered(tmp_path: Path) -> None:
    async with serving(ScriptedWorker()) as worker, scheduling(tmp_path, worker) as target, session(target) as client:
        prompts = {number: list(range(1, 2 + number)) for number in range(20)}  # more than there are slots
        for number, prompt in prompts.items():
            client.submit(submit(number, prompt, max_tokens=20))
        for number, prompt in prompts.items():
            answer = await client.ended(number)
            assert answer.ids == expected(prompt, 20)
            assert answer.finished is not None
            assert answer.finished.completion_tokens == len(answer.ids)
            assert answer.finished.reason == (pb.FINISH_REASON_STOP if answer.ids[-1] == EOS else pb.FINISH_REASON_LENGTH)


async def test_requests_of_one_message_share_a_step(tmp_path: Path) -> None:
    async with serving(ScriptedWorker()) as worker, scheduling(tmp_path, worker) as target, session(target) as client:
        prompts = {number: [number + 1, 2] for number in range(LIMITS.slots)}
        client.submit_together(*(submit(number, prompt, 5) for number, prompt in prompts.items()), submit(100, [], 5))
        for number, prompt in prompts.items():
            assert (await client.ended(number)).ids == expected(prompt, 5)
        assert worker.prefills[0] == LIMITS.slots
        assert (await client.ended(100)).rejected is not None  # which disturbs no other


async def test_too_many_requests_in_one_message_end_the_session(tmp_path: Path) -> None:
    async with serving(ScriptedWorker()) as worker, scheduling(tmp_path, worker) as target:

        async def ask_too_much() -> None:
            async with session(target) as client:
                client.submit_together(*(submit(number, [1], 1) for number in range(MAX_SUBMITS + 1)))
                await eventually_async(client.call.done)

        with pytest.raises(StreamEnded, match=f"{MAX_SUBMITS + 1} requests in one message"):
            await ask_too_much()
        async with session(target) as client:  # nobody else's
            client.submit(submit(1, [1], 3))
            assert (await client.ended(1)).ids == expected([1], 3)


async def test_two_workers_share_the_load(tmp_path: Path) -> None:
    async with serving(ScriptedWorker()) as one, serving(ScriptedWorker()) as other, scheduling(tmp_path, one, other) as target:
        await eventually_async(lambda: bool(one.hellos and other.hellos))
        async with session(target) as client:
            for number in range(8):
                client.submit(submit(number, [number + 1], max_tokens=30))
            for number in range(8):
                assert (await client.ended(number)).ids == expected([number + 1], 30)
        assert one.plans
        assert other.plans


async def test_describe_waits_for_a_group(tmp_path: Path) -> None:
    worker = ScriptedWorker()
    worker.ready = False
    async with serving(worker), scheduling(tmp_path, worker, ready=False) as target:
        with pytest.raises(grpc.aio.AioRpcError, match="no worker group") as caught:
            await describe(target)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await serving_status(target) == health_pb2.HealthCheckResponse.NOT_SERVING
        async with session(target) as client:
            client.submit(submit(1, [1], 1))
            answer = await client.ended(1)
            assert answer.rejected is not None
            assert answer.rejected.reason == pb.REJECT_REASON_UNAVAILABLE
        worker.ready = True
        async with asyncio.timeout(30):
            while await serving_status(target) != health_pb2.HealthCheckResponse.SERVING:
                await asyncio.sleep(0.01)
        described = await describe(target)
        assert (described.fingerprint, described.vocab_size, list(described.eos_ids)) == ("abc", LIMITS.vocab_size, [EOS])
        assert described.max_length == LIMITS.max_length


async def test_another_protocol_is_refused(tmp_path: Path) -> None:
    async with serving(ScriptedWorker()) as worker, scheduling(tmp_path, worker) as target, channel(target) as opened:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await GenerationStub(opened).Describe(pb.GenerationDescribeRequest(protocol_version="2.0"))
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_files_are_relayed(tmp_path: Path) -> None:
    async with serving(ScriptedWorker()) as worker, scheduling(tmp_path, worker) as target, channel(target) as opened:
        stub = GenerationStub(opened)
        assert await files.receive(aiter(stub.Files(pb.GenerationFilesRequest(fingerprint="abc")))) == list(FILES)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await files.receive(aiter(stub.Files(pb.GenerationFilesRequest(fingerprint="other"))))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_resumed_request_goes_on_after_what_was_delivered(tmp_path: Path) -> None:
    async with serving(ScriptedWorker()) as worker, scheduling(tmp_path, worker) as target, session(target) as client:
        whole = expected([4, 2], 12)
        client.submit(submit(1, [4, 2], 12, attempt=2, delivered=tuple(whole[:5])))
        assert (await client.ended(1, attempt=2)).ids == whole
        client.submit(submit(1, [4, 2], 12, attempt=3, delivered=tuple(whole)))  # its end alone was lost
        answer = await client.ended(1, attempt=3)
        assert answer.finished is not None
        assert answer.finished.completion_tokens == len(whole)


@pytest.mark.parametrize(
    "message, reason",
    [
        (submit(1, [], 3), pb.REJECT_REASON_INVALID),
        (submit(1, [LIMITS.vocab_size], 3), pb.REJECT_REASON_INVALID),
        (submit(1, [1] * 60, 5), pb.REJECT_REASON_TOO_LONG),
        (pb.Submit(request=1, attempt=1, prompt_ids=bytes(7), max_tokens=3), pb.REJECT_REASON_INVALID),
    ],
)
async def test_what_is_not_acceptable_is_rejected(tmp_path: Path, message: pb.Submit, reason: int) -> None:
    async with serving(ScriptedWorker()) as worker, scheduling(tmp_path, worker) as target, session(target) as client:
        client.answers[1, 1] = Answer()
        client.outbox.put(pb.GenerationSessionRequest(submit=message))
        client.submit(submit(2, [1], 3))
        answer = await client.ended(1)
        assert answer.rejected is not None
        assert answer.rejected.reason == reason
        assert (await client.ended(2)).ids == expected([1], 3)


async def test_cancel_frees_the_slot(tmp_path: Path) -> None:
    worker = ScriptedWorker(ONE_SLOT, step_s=0.005)
    async with serving(worker), scheduling(tmp_path, worker) as target, session(target) as client:
        client.submit(submit(1, [1], 60, ignore_eos=True))
        client.submit(submit(2, [2], 3))
        await client.until(1, lambda answer: len(answer.ids) >= 3)
        client.cancel(1, accepted=2)
        client.cancel(1)
        client.cancel(99)
        answer = await client.ended(1)
        assert answer.finished is not None
        assert answer.finished.reason == pb.FINISH_REASON_CANCELLED
        assert (await client.ended(2)).ids == expected([2], 3)


async def test_a_cancel_may_come_first(tmp_path: Path) -> None:
    async with serving(ScriptedWorker()) as worker, scheduling(tmp_path, worker) as target, session(target) as client:
        client.cancel(1, attempt=1)
        client.submit(submit(1, [1], 60))
        client.submit(submit(1, [1], 3, attempt=2))
        answer = await client.ended(1)
        assert answer.finished is not None
        assert answer.finished.reason == pb.FINISH_REASON_CANCELLED
        assert (await client.ended(1, attempt=2)).ids == expected([1], 3)


async def test_a_session_that_ends_takes_its_requests_along(tmp_path: Path) -> None:
    async with serving(ScriptedWorker(ONE_SLOT, step_s=0.005)) as worker, scheduling(tmp_path, worker) as target:
        async with session(target) as client:
            client.submit(submit(1, [1], 60, ignore_eos=True))
            client.submit(submit(2, [1], 60, ignore_eos=True))
            await client.until(1, lambda answer: bool(answer.ids))
        plans = worker.plans
        async with session(target) as client:
            client.submit(submit(1, [2], 3))
            assert (await client.ended(1)).ids == expected([2], 3)
        assert worker.plans < plans + 30


async def test_a_silent_gateway_is_dropped(tmp_path: Path) -> None:
    async def only_a_hello() -> AsyncIterator[pb.GenerationSessionRequest]:
        yield pb.GenerationSessionRequest(hello=pb.SessionHello(protocol_version=PROTOCOL_VERSION, gateway="mute"))
        yield pb.GenerationSessionRequest(submit=submit(1, [1], 60, ignore_eos=True))
        await asyncio.Event().wait()

    worker = ScriptedWorker(ONE_SLOT)
    async with serving(worker), scheduling(tmp_path, worker) as target, channel(target) as opened, session(target) as client:
        worker.running.clear()
        call = GenerationStub(opened).Session(only_a_hello())
        with pytest.raises(grpc.aio.AioRpcError, match="nothing for 2 s"):
            async for _ in call:
                pass
        worker.running.set()
        client.submit(submit(1, [2], 3))
        assert (await client.ended(1)).ids == expected([2], 3)


async def test_requests_of_a_lost_worker_go_on_when_it_is_found_again(tmp_path: Path) -> None:
    worker = ScriptedWorker(step_s=0.005)
    async with contextlib.AsyncExitStack() as stack:
        port = port_of(stack.enter_context(reserve("127.0.0.1")))
        first = await stack.enter_async_context(contextlib.AsyncExitStack())
        await first.enter_async_context(serving(worker, port))
        target = await stack.enter_async_context(scheduling(tmp_path, worker))
        client = await stack.enter_async_context(session(target))
        client.submit(submit(1, [1], 60))
        await client.until(1, lambda answer: len(answer.ids) >= 3)
        await first.aclose()
        client.submit(submit(2, [2], 3))
        again = ScriptedWorker()
        await stack.enter_async_context(serving(again, port))
        assert (await client.ended(1)).ids == expected([1], 60)
        assert (await client.ended(2)).ids == expected([2], 3)
        assert again.hellos[0] > worker.hellos[0]


async def test_a_silent_worker_is_lost(tmp_path: Path) -> None:
    async with serving(ScriptedWorker()) as worker, scheduling(tmp_path, worker) as target, session(target) as client:
        worker.silent = True
        client.submit(submit(1, [1], 60))
        await eventually_async(lambda: len(worker.hellos) == 2)
        assert worker.hellos[1] > worker.hellos[0]
        worker.silent = False
        assert (await client.ended(1)).ids == expected([1], 60)
        client.submit(submit(2, [2], 3))
        assert (await client.ended(2)).ids == expected([2], 3)


@pytest.mark.parametrize("plan, stream", [(999, 1), (0, 7)])
async def test_a_result_that_cannot_be_ends_the_stream(tmp_path: Path, plan: int, stream: int) -> None:
    async with serving(ScriptedWorker()) as worker, scheduling(tmp_path, worker) as target, session(target) as client:
        await eventually_async(lambda: worker.outbox is not None)
        assert worker.outbox is not None
        result = execution_pb2.PlanResult(
            plan=plan, epoch=worker.hellos[0][0], stream=stream, iterations=1, ids=bytes(4), slot_epochs=bytes(4)
        )
        worker.outbox.put(execution_pb2.ExecutionExecuteResponse(result=result))
        await eventually_async(lambda: len(worker.hellos) == 2)
        client.submit(submit(1, [2], 3))
        assert (await client.ended(1)).ids == expected([2], 3)


async def test_a_worker_of_too_many_groups_is_refused(tmp_path: Path) -> None:
    worker = ScriptedWorker()
    worker.groups = MAX_GROUPS + 1
    async with serving(worker), scheduling(tmp_path, worker, ready=False):
        await eventually_async(lambda: worker.described_ready > 1)  # it is asked again
        assert not worker.hellos
        worker.groups = 1
        await groups_ready(tmp_path, 1)


async def test_a_worker_that_lives_and_never_welcomes_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "WELCOME_S", 0.75)  # of which heartbeats tell twice
    worker = ScriptedWorker()
    worker.welcoming = False
    async with serving(worker), scheduling(tmp_path, worker, ready=False):
        await eventually_async(lambda: len(worker.hellos) == 2)


async def test_k8s_12_a_group_that_lives_and_answers_no_plan_is_given_up(tmp_path: Path) -> None:
    hanging, well = ScriptedWorker(name="hanging"), ScriptedWorker(name="well")
    hanging.running.clear()  # heartbeats go on
    async with (
        serving(hanging),
        serving(well),
        scheduling(tmp_path, hanging, well, plan_deadline_s=0.5) as target,
        session(target) as client,
    ):
        await groups_ready(tmp_path, 2)
        for number in range(16):
            client.submit(submit(number, [number + 1], 20))
        await eventually_async(lambda: len(hanging.hellos) > 1)
        assert re.fullmatch(r"given up: no result of plan 0 for \d+\.\d s, and heartbeats go on", hanging.goodbyes[0])
        for number in range(16):
            assert (await client.ended(number)).ids == expected([number + 1], 20)
        values = await metrics(tmp_path)
        assert values["lockstep_scheduler_group_losses_total{cause=overdue,engine=hanging,model_name=default}"] >= 1
        assert values["lockstep_scheduler_group_ejections_total{engine=hanging,model_name=default}"] >= 1
        assert values["lockstep_scheduler_group_ready{engine=hanging,model_name=default}"] == 0
        assert values["lockstep_scheduler_group_losses_total{cause=overdue,engine=well,model_name=default}"] == 0


async def test_k8s_12_a_group_that_fails_every_row_is_ejected_until_it_is_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "FIRST_S", 0.2)
    sick, well = ScriptedWorker(name="sick"), ScriptedWorker(name="well")
    sick.sick = True
    async with serving(sick), serving(well), scheduling(tmp_path, sick, well) as target, session(target) as client:
        await groups_ready(tmp_path, 2)
        numbers = count()

        async def ask() -> bool:
            """Whether the sick one has got something to do."""
            plans, number = sick.plans, next(numbers)
            client.submit(submit(number, [number % 40 + 1], 3))
            assert (await client.ended(number)).ids == expected([number % 40 + 1], 3)  # whoever was asked first
            return sick.plans > plans

        async def ejected() -> bool:
            await ask()
            groups = {group["name"]: group for group in (await debug_page(tmp_path, "groups"))["groups"]}
            return bool(groups["sick"]["ejected"])

        async with asyncio.timeout(30):
            while not await ejected():
                pass
        assert sum([await ask() for _ in range(20)]) < 10  # trials
        values = await metrics(tmp_path)
        assert values["lockstep_scheduler_group_ejections_total{engine=sick,model_name=default}"] >= 1
        assert values["lockstep_scheduler_requests_moved_total{cause=failed,model_name=default}"] >= MAX_FAILURES
        assert values["lockstep_request_success_total{engine=well,finished_reason=error,model_name=default}"] == 0
        assert len([record for record in caplog.records if "is ejected until" in record.message]) == 1
        sick.sick = False
        async with asyncio.timeout(30):
            while await ejected():
                pass


async def test_requests_of_the_only_group_end_with_an_error_while_it_fails_every_row(tmp_path: Path) -> None:
    worker = ScriptedWorker()
    worker.sick = True
    async with serving(worker), scheduling(tmp_path, worker) as target, session(target) as client:
        for number in range(12):
            client.submit(submit(number, [number + 1], 5))
        for number in range(12):
            answer = await client.ended(number)
            assert answer.finished is not None
            assert (answer.finished.reason, answer.finished.detail) == (pb.FINISH_REASON_ERROR, "the model's output was not finite")
        worker.sick = False
        client.submit(submit(100, [1], 5))
        assert (await client.ended(100)).ids == expected([1], 5)


async def test_a_leader_that_ends_tells_no_client_that_its_worker_was_lost(tmp_path: Path) -> None:
    """It closes one stream after the other, and more of them than a request may lose."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(serving(ScriptedWorker(name=f"group-{number}"))) for number in range(6)]
        for worker in workers:
            worker.running.clear()
        lease = tmp_path / "lease"
        service = await stack.enter_async_context(contextlib.AsyncExitStack())
        leader = scheduling(tmp_path, *workers, leadership=f"file:{lease}", lease_renewal_s=0.1, ends_by_itself=True)
        target = await service.enter_async_context(leader)
        await groups_ready(tmp_path, len(workers))
        with contextlib.suppress(StreamEnded):  # the end of the session may cross a heartbeat
            async with session(target) as client:
                for number in range(30):
                    client.submit(submit(number, [number + 1], 60, ignore_eos=True))
                await eventually_async(lambda: all(worker.received for worker in workers))
                epoch = max(int(path.name) for path in lease.iterdir() if path.name.isdecimal())
                (lease / str(epoch + 1)).write_text(json.dumps({"address": "elsewhere:1", "pid": 1}))
                await eventually_async(client.call.done)
        with pytest.raises(SteppedDown):
            await service.aclose()
        assert not any(answer.ended for answer in client.answers.values())
        assert not any(client.unplanned_moves.values())


async def test_held_requests_are_rejected_after_a_while(tmp_path: Path) -> None:
    worker = ScriptedWorker()
    async with contextlib.AsyncExitStack() as stack:
        port = port_of(stack.enter_context(reserve("127.0.0.1")))  # where no other worker is to be found afterwards
        first = await stack.enter_async_context(contextlib.AsyncExitStack())
        await first.enter_async_context(serving(worker, port))
        target = await stack.enter_async_context(scheduling(tmp_path, worker, group_wait_s=0.2))
        client = await stack.enter_async_context(session(target))
        await first.aclose()
        async with asyncio.timeout(30):
            while await serving_status(target) == health_pb2.HealthCheckResponse.SERVING:
                await asyncio.sleep(0.01)
        client.submit(submit(1, [1], 3))
        answer = await client.ended(1)
        assert answer.rejected is not None
        assert answer.rejected.reason == pb.REJECT_REASON_UNAVAILABLE


async def test_a_full_queue_rejects_but_for_resumed_requests(tmp_path: Path) -> None:
    worker = ScriptedWorker(ONE_SLOT)
    async with serving(worker), scheduling(tmp_path, worker, max_waiting_requests=2) as target, session(target) as client:
        worker.running.clear()
        for number in range(4):
            client.submit(submit(number, [1], 5))
        client.submit(submit(4, [1], 5, attempt=2, delivered=tuple(expected([1], 2))))
        answer = await client.ended(3)
        assert answer.rejected is not None
        assert answer.rejected.reason == pb.REJECT_REASON_OVERLOADED
        assert answer.rejected.retry_after_ms >= 1_000
        worker.running.set()
        for number in range(3):
            assert (await client.ended(number)).ids == expected([1], 5)
        assert (await client.ended(4, attempt=2)).ids == expected([1], 5)


async def test_a_deadline_passes_while_waiting_and_while_running(tmp_path: Path) -> None:
    worker = ScriptedWorker(ONE_SLOT)
    async with serving(worker), scheduling(tmp_path, worker) as target, session(target) as client:
        worker.running.clear()
        client.submit(submit(1, [1], 60, deadline_ms=150))
        client.submit(submit(2, [1], 60, deadline_ms=150))
        running, waiting = await client.ended(1), await client.ended(2)
        for answer in (running, waiting):
            assert answer.finished is not None
            assert answer.finished.reason == pb.FINISH_REASON_DEADLINE
        worker.running.set()  # a scheduler that stops waits for what is on its way


async def test_a_stop_ends_sessions_in_good_order(tmp_path: Path) -> None:
    async with serving(ScriptedWorker(step_s=0.005)) as worker, contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(contextlib.AsyncExitStack())
        target = await service.enter_async_context(scheduling(tmp_path, worker))
        client = await stack.enter_async_context(session(target))
        client.submit(submit(1, [1], 60, ignore_eos=True))
        answer = await client.until(1, lambda answer: len(answer.ids) >= 3)
        await service.aclose()
        await eventually_async(lambda: client.ended_well)
        assert not answer.ended  # the next scheduler goes on with it


@contextlib.asynccontextmanager
async def leading() -> AsyncIterator[tuple[GenerationService, str]]:
    """The side for gateways, by itself, and its address."""
    leadership, metered = Leadership(NoLease()), SchedulerMetrics("tiny", False, CollectorRegistry())
    await leadership.acquire("127.0.0.1:1")
    service = GenerationService(load(SchedulerSettings, "scheduler", ["--worker", "127.0.0.1:1"]), leadership, metered, History())
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_GenerationServicer_to_server(service, server)
    target = f"127.0.0.1:{await start_server(server, '127.0.0.1', 0)}"
    try:
        yield service, target
    finally:
        await server.stop(None)


async def test_who_has_ended_its_sessions_begins_none_any_more() -> None:
    """Else a gateway would submit everything to a scheduler that is about to be gone."""
    async with leading() as (service, target):
        with contextlib.suppress(StreamEnded):  # the end of the session may cross a heartbeat
            async with session(target) as client:
                await eventually_async(lambda: client.epoch)
                service.end_sessions()
                await eventually_async(client.call.done)
        with pytest.raises(StreamEnded, match="unavailable: stopping"):
            async with session(target) as client:
                await eventually_async(client.call.done)
        with pytest.raises(grpc.aio.AioRpcError, match="stopping"):
            await describe(target)


async def test_a_session_that_begins_while_all_are_ended_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with leading() as (service, target):

        async def shown(epoch: int) -> None:
            service.end_sessions()  # while the hello is looked at

        monkeypatch.setattr(service.leadership, "shown", shown)
        with contextlib.suppress(StreamEnded):  # as above
            async with session(target) as client:
                await eventually_async(client.call.done)
                assert await client.call.code() == grpc.StatusCode.OK


async def test_a_leader_outlives_certificates_that_are_away_for_a_moment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_certificates(tmp_path / "tls", trustme.CA(), "127.0.0.1")
    async with serving(ScriptedWorker()) as worker, scheduling(tmp_path, worker, ready=False, tls_folder=folder):  # which has none itself
        (folder / "tls.crt").rename(tmp_path / "tls.crt")
        await eventually_async(lambda: "tls.crt cannot be read" in caplog.text)


async def test_another_model_is_refused(tmp_path: Path) -> None:
    async with serving(ScriptedWorker()) as worker, serving(ScriptedWorker(fingerprint="xyz")) as other:
        other.ready = False
        async with scheduling(tmp_path, worker, other) as target, session(target) as client:
            other.ready = True
            for number in range(8):
                client.submit(submit(number, [number], 40))
            for number in range(8):
                await client.ended(number)
            await eventually_async(lambda: other.described_ready > 1)
            assert not other.hellos


async def test_a_group_whose_books_would_take_too_long_to_make_is_refused(tmp_path: Path) -> None:
    worker, large = ScriptedWorker(), ScriptedWorker(replace(LIMITS, pages=MAX_PAGES + 1))
    async with serving(worker), serving(large), scheduling(tmp_path, worker, large) as target, session(target) as client:
        await eventually_async(lambda: large.described_ready > 1)  # it was refused, and asked again
        assert not large.hellos
        client.submit(submit(1, [1], 3))
        assert (await client.ended(1)).ids == expected([1], 3)


async def test_the_admin_port_tells_readiness_and_what_requests_went_through(tmp_path: Path) -> None:
    worker = ScriptedWorker(step_s=0.005)
    async with contextlib.AsyncExitStack() as stack:
        port = port_of(stack.enter_context(reserve("127.0.0.1")))
        workers = await stack.enter_async_context(contextlib.AsyncExitStack())
        await workers.enter_async_context(serving(worker, port))
        target = await stack.enter_async_context(scheduling(tmp_path, worker, served_model_name="tiny", group_wait_s=0.2, bursts=False))
        port = json.loads((tmp_path / "ports.json").read_text())["admin"]
        admin = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False))
        client = await stack.enter_async_context(session(target))
        client.submit(submit(1, [1, 2, 3], 4, ignore_eos=True))
        client.submit(submit(2, [1], 0))
        await client.ended(1)
        await client.ended(2)
        worker.last_plan = worker.plans + 4  # however long it takes to look, the next request is in the middle of its answer
        client.submit(submit(3, [1], 60, ignore_eos=True))
        await client.until(3, lambda answer: len(answer.ids) >= 2)

        async def metric(name: str, *labels: str) -> float:
            return samples(await admin.get("/metrics"))[f"{name}{{{','.join(sorted((*labels, 'model_name=tiny')))}}}"]

        group = "engine=group-0"
        assert (await admin.get("/readyz")).status_code == 200
        assert await metric("lockstep_num_requests_running", group) == 1
        assert await metric("vllm:kv_cache_usage_perc", group) == pytest.approx(1 / 32, abs=3 / 32)
        assert await metric("lockstep_request_success_total", "finished_reason=length", group) == 1
        assert await metric("lockstep_prompt_tokens_total", group) == 4
        assert await metric("lockstep_request_generation_tokens_sum", group) == 4
        assert await metric("lockstep_inter_token_latency_seconds_count", group) >= 4
        assert await metric("lockstep_scheduler_requests_rejected_total", "reason=invalid") == 1
        await workers.aclose()
        await client.ended(3)
        assert await metric("lockstep_num_requests_running", group) == 0
        assert await metric("lockstep_request_success_total", "finished_reason=error", "engine=none") == 1
        assert await metric("lockstep_scheduler_requests_moved_total", "cause=lost") == 1
        answer = await admin.get("/readyz")
        assert (answer.status_code, answer.text) == (503, "no worker group is ready\n")
        async with session(target) as leaving:
            leaving.submit(submit(1, [1], 3))
            leaving.outbox.close()  # as a gateway does that is at the end of its time
            await eventually_async(lambda: leaving.ended_well)
        assert await metric("lockstep_scheduler_requests_cut_off_total", "component=gateway") == 1
        assert await metric("lockstep_scheduler_requests_cut_off_total", "component=worker") == 0


async def test_epochs_rise_above_what_others_have_seen(tmp_path: Path) -> None:
    worker = ScriptedWorker()
    worker.hellos.append((5, 9))
    async with serving(worker), scheduling(tmp_path, worker) as target:
        assert worker.hellos[1][0] == 6
        async with session(target, highest_epoch=40) as client:
            await eventually_async(lambda: client.epoch >= 40)


async def test_a_draining_group_gets_nothing_new(tmp_path: Path) -> None:
    async with serving(ScriptedWorker(ONE_SLOT)) as worker, serving(ScriptedWorker()) as other:
        other.ready = False
        worker.last_plan = 2  # it is told to drain in the middle of an answer
        async with scheduling(tmp_path, worker, other) as target, session(target) as client:
            client.submit(submit(1, [1], 50, ignore_eos=True))
            client.submit(submit(2, [2], 5))  # waits for the slot
            await client.until(1, lambda answer: bool(answer.ids))
            assert worker.outbox is not None
            draining = execution_pb2.Draining(remaining_ms=5_000)
            worker.outbox.put(execution_pb2.ExecutionExecuteResponse(draining=draining))
            async with asyncio.timeout(30):
                while await serving_status(target) == health_pb2.HealthCheckResponse.SERVING:
                    await asyncio.sleep(0.005)
            worker.running.set()
            other.ready = True
            assert (await client.ended(2)).ids == expected([2], 5)
            assert len((await client.ended(1)).ids) == 50
            assert other.plans
