"""`python -m services.worker`: the supervisor of one worker group and, as its children, the ranks."""

import asyncio
import logging

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.worker.metrics import WorkerMetrics
from services.worker.server import ExecutionService
from services.worker.settings import WorkerSettings
from services.worker.supervisor import Supervisor
from services.worker.weights.folder import ModelFolder
from shared.admin import admin
from shared.metrics import new_registry
from shared.process import write_ports
from shared.protocol.execution_pb2_grpc import add_ExecutionServicer_to_server
from shared.rpc import SERVER_OPTIONS, start_server
from shared.service import run

logger = logging.getLogger("services.worker")

OVERDUE_GRACE_S = 10.0  # a supervisor that has not ended an overdue group after this long is stuck itself


async def serve(settings: WorkerSettings, stop: asyncio.Event) -> None:
    folder = ModelFolder(settings.model, settings.load_format)
    registry = new_registry("worker")
    supervisor = Supervisor(settings, WorkerMetrics(settings.group, settings.tensor_parallel_size, registry))

    def readiness() -> str | None:
        if supervisor.facts is None:
            return f"{supervisor.phase}: {supervisor.progress:.0%}"
        return "stopping" if stop.is_set() else None

    server = grpc.aio.server(options=SERVER_OPTIONS)
    async with admin(settings, registry, readiness, lambda: supervisor.overdue(OVERDUE_GRACE_S)) as admin_port:
        try:
            supervisor.start_ranks()  # first: their imports take longest
            service = ExecutionService(supervisor, folder, await asyncio.to_thread(lambda: folder.fingerprint))
            add_ExecutionServicer_to_server(service, server)
            healthy = health.aio.HealthServicer()
            health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
            await healthy.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
            port = await start_server(server, settings.host, settings.port)
            if settings.ports_file is not None:
                write_ports(settings.ports_file, {"grpc": port, "admin": admin_port})
            stopping = asyncio.create_task(stop.wait())
            ready = asyncio.create_task(supervisor.ready())
            await asyncio.wait((stopping, ready), return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                await ready
                await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
                assert supervisor.facts is not None
                logger.info("ready on port %d: %s, tp %d, %s", port, settings.model.name, settings.tensor_parallel_size, supervisor.facts)
                await asyncio.wait((stopping, supervisor.failed), return_when=asyncio.FIRST_COMPLETED)
                if supervisor.failed.done():
                    supervisor.failed.result()
            ready.cancel()
            service.announce_draining(0)
        finally:
            await server.stop(0.2)
            supervisor.stop()


def main() -> None:
    run("lockstep-worker", WorkerSettings, serve)


if __name__ == "__main__":
    main()
