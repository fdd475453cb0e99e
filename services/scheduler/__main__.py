"""`python -m services.scheduler`: gRPC for gateways on one side, streams to the workers on the other."""

import asyncio
import logging
import time

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.scheduler.connection import Worker
from services.scheduler.leadership import Leadership
from services.scheduler.server import GenerationService
from services.scheduler.settings import SchedulerSettings
from shared import service
from shared.process import write_ports
from shared.protocol.generation_pb2_grpc import add_GenerationServicer_to_server
from shared.rpc import SERVER_OPTIONS, start_server

logger = logging.getLogger(__name__)

TICK_S = 0.1  # how late a deadline may be noticed
STOP_S = 1.0  # for what is on its way to gateways


async def serve(settings: SchedulerSettings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set. Raises LockstepError when the port is taken."""
    leadership = Leadership()
    generation = GenerationService(settings, leadership)
    scheduler = generation.scheduler
    readiness = health.aio.HealthServicer()
    changed = asyncio.Event()
    changed.set()

    async def tell_readiness() -> None:
        while True:
            await changed.wait()
            changed.clear()
            ready = any(not group.draining for group in scheduler.groups)
            status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
            for name in ("", "lockstep.v1.Generation"):
                await readiness.set(name, status)

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            scheduler.tick(time.monotonic())

    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_GenerationServicer_to_server(generation, server)
    health_pb2_grpc.add_HealthServicer_to_server(readiness, server)
    port = await start_server(server, settings.host, settings.port)
    if settings.ports_file is not None:
        write_ports(settings.ports_file, {"grpc": port})
    logger.info("listening on %s:%d", settings.host, port)
    workers = [Worker(target, scheduler, leadership, settings.max_step_tokens, settings.overlap, changed.set) for target in settings.worker]
    try:
        async with asyncio.TaskGroup() as tasks:  # a task that fails ends the service
            running = [tasks.create_task(each) for each in (tell_readiness(), tick(), *(worker.run() for worker in workers))]
            await stop.wait()
            for task in running:
                task.cancel()
    finally:
        await server.stop(STOP_S)


def main() -> None:
    service.run("scheduler", SchedulerSettings, serve)


if __name__ == "__main__":
    main()
