"""Waiting for a worker that loads its model, with what it tells of that on the terminal."""

import asyncio
import logging
from collections.abc import Callable

import grpc

from services.local.progress import StartupProgress
from shared.protocol import execution_pb2 as pb
from shared.protocol.execution_pb2_grpc import ExecutionStub
from shared.rpc import PROTOCOL_VERSION, channel

logger = logging.getLogger(__name__)

POLL_EVERY_S = 0.05
POLL_TIMEOUT_S = 2.0


async def until_loaded(
    address: str, progress: StartupProgress, label: str = "", enough: Callable[[pb.WorkerGroup], bool] = lambda group: group.ready
) -> pb.WorkerGroup:
    """The one group of the worker at `address`, once that is `enough`; its phases are shown behind `label` until then."""
    async with channel(address) as opened:
        worker = ExecutionStub(opened)
        while True:
            try:
                answer = await worker.Describe(pb.ExecutionDescribeRequest(protocol_version=PROTOCOL_VERSION), timeout=POLL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:  # it is about to end, or busy
                logger.debug("worker at %s: %s", address, error.details())
            else:
                (group,) = answer.groups
                if enough(group):
                    return group
                progress.show(f"{label}{group.phase}", group.progress)
            await asyncio.sleep(POLL_EVERY_S)
