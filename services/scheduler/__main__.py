"""`python -m services.scheduler`: gRPC for gateways on one side, streams to the workers on the other."""

import asyncio
import logging
import time

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.scheduler.connection import Worker
from services.scheduler.debug import groups_page
from services.scheduler.history import History
from services.scheduler.leadership import Leadership
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.server import GenerationService
from services.scheduler.settings import SchedulerSettings
from shared.admin import admin
from shared.metrics import new_registry
from shared.process import write_ports
from shared.protocol.generation_pb2_grpc import add_GenerationServicer_to_server
from shared.rpc import SERVER_OPTIONS, start_server
from shared.service import run
from shared.tracing import tracing

logger = logging.getLogger("services.scheduler")

TICK_S = 0.1  # how late a deadline may be noticed
STOP_S = 1.0  # for what is on its way to gateways


async def serve(settings: SchedulerSettings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set. Raises LockstepError when a port is taken."""
    async with tracing("lockstep-scheduler", settings.trace_endpoint, settings.trace_ratio) as tracer:
        await _serve(settings, stop, History(tracer, settings.log_requests))


async def _serve(settings: SchedulerSettings, stop: asyncio.Event, history: History) -> None:
    leadership = Leadership()
    registry = new_registry("scheduler")
    metrics = SchedulerMetrics(settings.served_model_name, settings.vllm_names, registry)
    generation = GenerationService(settings, leadership, metrics, history)
    scheduler = generation.scheduler
    healthy = health.aio.HealthServicer()
    changed = asyncio.Event()  # a group has come or gone
    changed.set()

    def readiness() -> str | None:
        if stop.is_set():
            return "stopping"
        return None if any(not group.draining for group in scheduler.groups) else "no worker group is ready"

    async def tell_health() -> None:
        while True:
            await changed.wait()
            changed.clear()
            status = health_pb2.HealthCheckResponse.NOT_SERVING if readiness() else health_pb2.HealthCheckResponse.SERVING
            for name in ("", "lockstep.v1.Generation"):
                await healthy.set(name, status)

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            scheduler.tick(time.monotonic())

    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_GenerationServicer_to_server(generation, server)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    workers = [
        Worker(
            target,
            scheduler,
            leadership,
            metrics,
            settings.max_step_tokens,
            settings.overlap,
            settings.bursts,
            settings.jump,
            settings.policy,
            settings.prefix_cache,
            changed.set,
        )
        for target in settings.worker
    ]
    pages = {
        "/debug/requests": lambda: scheduler.requests_page(time.monotonic()),
        "/debug/groups": lambda: groups_page(scheduler.groups),
    }
    async with admin(settings, registry, readiness, pages=pages) as admin_port:
        try:
            port = await start_server(server, settings.host, settings.port)
            if settings.ports_file is not None:
                write_ports(settings.ports_file, {"grpc": port, "admin": admin_port})
            logger.info("listening on %s:%d", settings.host, port)
            async with asyncio.TaskGroup() as tasks:  # one that fails ends the service
                running = [tasks.create_task(each) for each in (tell_health(), tick(), *(worker.run() for worker in workers))]
                await stop.wait()
                generation.end_sessions()
                for task in running:
                    task.cancel()
        finally:
            await server.stop(STOP_S)


def main() -> None:
    run("lockstep-scheduler", SchedulerSettings, serve)


if __name__ == "__main__":
    main()
