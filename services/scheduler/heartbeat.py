"""Whether a scheduler that others say leads is there."""

import logging
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.rpc import channel

logger = logging.getLogger(__name__)

ANSWER_S = 1.0


async def answers(address: str, tls: Path | None = None) -> bool:
    """Asks its health service. tls: see `shared.tls`."""
    async with channel(address, tls) as opened:
        try:
            await health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            logger.info("the scheduler at %s, which leads, does not answer: %s", address, error.code().name.lower())
            return False
    return True
