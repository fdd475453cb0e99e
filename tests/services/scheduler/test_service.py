"""The whole scheduler over real gRPC, between a session of a gateway and the service of a worker."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.scheduler.__main__ import serve
from services.scheduler.settings import SchedulerSettings
from shared.protocol import files
from shared.protocol import generation_pb2 as pb
from shared.protocol.generation_pb2_grpc import GenerationStub
from shared.rpc import PROTOCOL_VERSION, channel
from tests.services.scheduler.device import EOS, next_token
from tests.services.scheduler.scripted_worker import FILES, LIMITS, ScriptedWorker, serving
from tests.services.scheduler.session_client import SessionClient, session, submit


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < max_tokens and (not ids or ids[-1] != EOS):
        ids.append(next_token(prompt + ids, LIMITS.vocab_size))
    return ids


@contextlib.asynccontextmanager
async def scheduling(folder: Path, *workers: ScriptedWorker, ready: bool = True, **settings: object) -> AsyncIterator[str]:
    """A scheduler in this process; yields its address once it is ready."""
    ports_file = folder / "ports.json"
    targets = [f"127.0.0.1:{worker.port}" for worker in workers]
    stop = asyncio.Event()
    service = asyncio.create_task(serve(SchedulerSettings(port=0, worker=targets, ports_file=ports_file, **settings), stop))
    try:
        async with asyncio.timeout(10):
            while not ports_file.exists():
                assert not service.done(), service.exception()
                await asyncio.sleep(0.005)
            target = f"127.0.0.1:{json.loads(ports_file.read_text())['grpc']}"
            while ready and await health(target) != health_pb2.HealthCheckResponse.SERVING:
                await asyncio.sleep(0.01)
        yield target
    finally:
        stop.set()
        await service


async def health(target: str) -> int:
    async with channel(target) as opened:
        return (await health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest())).status


async def describe(target: str) -> pb.GenerationDescribeResponse:
    async with channel(target) as opened:
        return await GenerationStub(opened).Describe(pb.GenerationDescribeRequest(protocol_version=PROTOCOL_VERSION))


async def test_requests_are_answered(tmp_path: Path) -> None:
    async with serving(ScriptedWorker()) as worker, scheduling(tmp_path, worker) as target, session(target) as client:
        prompts = {number: list(range(1, 2 + number)) for number in range(20)}
        for number, prompt in prompts.items():
            client.submit(submit(number, prompt, max_tokens=20))
        for number, prompt in prompts.items():
            answer = await client.ended(number)
            assert answer.ids == expected(prompt, 20)
            assert answer.finished is not None
            assert answer.finished.completion_tokens == len(answer.ids)
            assert answer.finished.reason == (pb.FINISH_REASON_STOP if answer.ids[-1] == EOS else pb.FINISH_REASON_LENGTH)
