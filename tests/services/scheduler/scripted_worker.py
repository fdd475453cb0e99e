"""A worker's gRPC service around the device of plain Python, in the test's own process."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from shared.protocol import execution_pb2 as pb
from shared.protocol.execution_pb2_grpc import ExecutionServicer, add_ExecutionServicer_to_server
from shared.protocol.files import ModelFile, messages
from shared.protocol.plan import Limits, decode, ids_to_bytes
from shared.rpc import PROTOCOL_VERSION, SERVER_OPTIONS, Outbox, StreamEnded, received, start_server
from tests.services.scheduler.device import EOS, FAIL, Device, next_token

FILES = (ModelFile("tokenizer.json", b"{}"), ModelFile("generation_config.json", b"[1]"))
LIMITS = Limits(slots=4, pages=33, page_size=4, max_length=64, max_step_tokens=32, vocab_size=50)


class ScriptedWorker(ExecutionServicer):
    """Steps take `step_s`; none ends while `running` is clear, though heartbeats go on."""

    def __init__(self, limits: Limits = LIMITS, fingerprint: str = "abc", step_s: float = 0.0005, name: str = "group-0") -> None:
        self.limits, self.fingerprint, self.step_s, self.name = limits, fingerprint, step_s, name
        self.ready = True
        self.groups = 1  # that it tells of
        self.sick = False  # every row fails
        self.welcoming = True  # else a hello is followed by heartbeats alone
        self.silent = False  # sends nothing, heartbeats included
        self.running = asyncio.Event()
        self.running.set()
        self.hellos: list[tuple[int, int]] = []
        self.goodbyes: list[str] = []
        self.received = 0  # plans
        self.plans = 0  # computed
        self.last_plan: int | None = None  # of these, after which it clears `running`
        self.prefills: list[int] = []  # rows with a prompt of each of them
        self.described_ready = 0  # times that Describe said so
        self.slot_epoch = 7
        self.outbox: Outbox[pb.ExecutionExecuteResponse] | None = None
        self.port = 0

    async def Describe(
        self, request: pb.ExecutionDescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ExecutionDescribeResponse:
        limits = self.limits
        self.described_ready += self.ready
        epoch, stream = max(self.hellos, default=(0, 0))
        group = pb.WorkerGroup(
            name=self.name,
            ready=self.ready,
            phase="ready" if self.ready else "loading weights",
            fingerprint=self.fingerprint,
            tp=1,
            page_size=limits.page_size,
            pages=limits.pages,
            slots=limits.slots,
            max_length=limits.max_length,
            max_step_tokens=limits.max_step_tokens,
            vocab_size=limits.vocab_size,
            eos_ids=[EOS],
            highest_epoch=epoch,
            highest_stream=stream,
        )
        return pb.ExecutionDescribeResponse(protocol_version=PROTOCOL_VERSION, groups=[group] * self.groups)

    async def Files(
        self, request: pb.ExecutionFilesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ExecutionFilesResponse]:
        for message in messages(FILES, pb.ExecutionFilesResponse):
            yield message

    async def Execute(
        self, request_iterator: AsyncIterator[pb.ExecutionExecuteRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ExecutionExecuteResponse]:
        incoming = received(request_iterator, "the scheduler")
        hello = (await anext(incoming)).hello
        identity = (hello.epoch, hello.stream)
        if identity <= max(self.hellos, default=(0, 0)):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not above the highest seen")
        self.hellos.append(identity)
        outbox: Outbox[pb.ExecutionExecuteResponse] = Outbox(lambda: pb.ExecutionExecuteResponse(heartbeat=pb.ExecuteHeartbeat()))
        self.outbox = outbox
        welcome = pb.ExecuteWelcome(protocol_version=PROTOCOL_VERSION, highest_slot_epoch=self.slot_epoch)
        if self.welcoming:
            outbox.put(pb.ExecutionExecuteResponse(welcome=welcome))
        plans: asyncio.Queue[tuple[bytes, float]] = asyncio.Queue()
        tasks = [asyncio.create_task(self._read(incoming, plans, outbox)), asyncio.create_task(self._compute(plans, outbox, identity))]
        try:
            async for message in outbox:
                while self.silent:
                    await asyncio.sleep(0.01)
                yield message
        finally:
            for task in tasks:
                task.cancel()

    async def _read(
        self,
        incoming: AsyncIterator[pb.ExecutionExecuteRequest],
        plans: asyncio.Queue[tuple[bytes, float]],
        outbox: Outbox[pb.ExecutionExecuteResponse],
    ) -> None:
        with contextlib.suppress(StreamEnded):
            async for message in incoming:
                match message.WhichOneof("message"):
                    case "plan":
                        self.received += 1
                        plans.put_nowait((message.plan, time.monotonic()))
                    case "goodbye":
                        self.goodbyes.append(message.goodbye.reason)
                        break
        outbox.close()

    async def _compute(
        self, plans: asyncio.Queue[tuple[bytes, float]], outbox: Outbox[pb.ExecutionExecuteResponse], identity: tuple[int, int]
    ) -> None:
        device = Device(self.limits, model=lambda ids, vocab_size: FAIL if self.sick else next_token(ids, vocab_size))
        for slot in device.slots:
            slot.epoch = self.slot_epoch
        end = time.monotonic()
        while True:
            data, received_at = await plans.get()
            start, before = time.monotonic(), end
            await asyncio.sleep(self.step_s)
            await self.running.wait()
            plan = decode(data)
            result = device.run(plan)
            end = time.monotonic()
            self.plans += 1
            if self.plans == self.last_plan:
                self.running.clear()
            self.prefills.append(len(plan.prefill_slots))
            self.slot_epoch = max(slot.epoch for slot in device.slots)
            message = pb.PlanResult(
                plan=result.plan_id,
                epoch=identity[0],
                stream=identity[1],
                iterations=len(result.ids),
                ids=ids_to_bytes(result.ids),
                slot_epochs=ids_to_bytes(result.slot_epochs),
                hold_us=round((end - received_at) * 1e6),
                start_us=round(start * 1e6),
                end_us=round(end * 1e6),
                idle_us=max(round((received_at - before) * 1e6), 0),
            )
            outbox.put(pb.ExecutionExecuteResponse(result=message))


@contextlib.asynccontextmanager
async def serving(worker: ScriptedWorker, port: int = 0) -> AsyncIterator[ScriptedWorker]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_ExecutionServicer_to_server(worker, server)
    worker.port = await start_server(server, "127.0.0.1", port)
    try:
        yield worker
    finally:
        await server.stop(None)
