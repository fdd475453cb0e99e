"""`python -m services.worker`: the supervisor of one worker group and, as its children, the ranks; of simulated groups, several.

On the nodes of a group beside its leader's: the ranks there, and what passes the leader's entries on to them.
"""

import asyncio
import logging

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.worker.engine.simulated import fingerprint
from services.worker.follower import follow
from services.worker.metrics import WorkerMetrics
from services.worker.nodes import NodesService, agreed
from services.worker.ranks import GroupFailed
from services.worker.server import ExecutionService, ServedGroup
from services.worker.settings import WorkerSettings
from services.worker.simulated_group import SimulatedSupervisor, language_of
from services.worker.supervisor import Supervisor
from services.worker.timers import Timers
from services.worker.weights.folder import ModelFolder
from shared.admin import admin
from shared.metrics import new_registry
from shared.process import settle_heap, write_ports
from shared.protocol.execution_pb2_grpc import add_ExecutionServicer_to_server
from shared.protocol.nodes_pb2_grpc import add_NodesServicer_to_server
from shared.rpc import SERVER_OPTIONS, start_server
from shared.service import run

logger = logging.getLogger("services.worker")

OVERDUE_GRACE_S = 10.0  # a supervisor that has not ended an overdue group after this long is stuck itself
FAREWELL_S = 1.0  # for those who have a stream to be told why it ends
RESTART_S = 1.0  # that a simulated group stays away after it failed, when it is one of several


async def serve(settings: WorkerSettings, stop: asyncio.Event) -> None:
    await (follow if settings.node_index else lead)(settings, stop)


async def lead(settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Serves all groups of this process until `stop` is set and they have drained."""
    simulated = settings.engine == "simulated"
    folder = ModelFolder(settings.model, settings.load_format)
    registry = new_registry("worker")
    metrics = WorkerMetrics(registry)
    timers = Timers() if simulated else None

    def supervise(name: str) -> Supervisor:
        own, its_metrics = settings.model_copy(update={"group": name}), metrics.group(name, settings.tensor_parallel_size)
        return Supervisor(own, its_metrics) if timers is None else SimulatedSupervisor(own, folder, timers, its_metrics)

    groups = [ServedGroup(supervise(name)) for name in settings.group_names]
    healthy = health.aio.HealthServicer()

    def readiness() -> str | None:
        for supervisor in (group.supervisor for group in groups):
            if supervisor.facts is None or supervisor.failed.done():
                return f"{supervisor.phase}: {supervisor.progress:.0%}"
        return "stopping" if stop.is_set() else None

    def overdue() -> str | None:
        return next((reason for group in groups if (reason := group.supervisor.overdue(OVERDUE_GRACE_S)) is not None), None)

    async def keep(group: ServedGroup) -> None:
        """Until its end, which is the process's; one of several simulated groups starts anew instead."""
        while True:
            supervisor = group.supervisor
            try:
                await supervisor.ready()
                name, facts = supervisor.settings.group, supervisor.facts
                logger.info("%s is ready: %s, tp %d, %s", name, settings.model.name, settings.tensor_parallel_size, facts)
                if readiness() is None:
                    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
                await asyncio.wait((supervisor.failed,))  # which a cancelled task leaves alone
                supervisor.failed.result()
            except GroupFailed as error:
                if len(groups) == 1:
                    raise
                logger.error("%s failed, and starts anew: %s", supervisor.settings.group, error)
                supervisor.stop()
                group.supervise(supervise(supervisor.settings.group))
                await asyncio.sleep(RESTART_S)
                group.supervisor.start_ranks()

    async def until_drained(service: ExecutionService, nodes: NodesService) -> None:
        await stop.wait()
        await healthy.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await service.drain(settings.drain_s)
        nodes.close()

    server = grpc.aio.server(options=SERVER_OPTIONS)
    async with admin(settings, registry, readiness, overdue) as admin_port:
        try:
            for group in groups:
                group.supervisor.start_ranks()  # first: their imports take longest
            own = await asyncio.to_thread(lambda: fingerprint(folder, language_of(settings, folder)) if simulated else folder.fingerprint)
            service = ExecutionService(groups, folder, own)
            add_ExecutionServicer_to_server(service, server)
            nodes = NodesService(groups[0].supervisor, agreed(settings, own), stop)  # of none, where a group has one
            add_NodesServicer_to_server(nodes, server)
            health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
            await healthy.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
            port = await start_server(server, settings.host, settings.port, settings.tls_folder)
            if settings.ports_file is not None:
                write_ports(settings.ports_file, {"grpc": port, "admin": admin_port})
            settle_heap()
            stopping = asyncio.create_task(until_drained(service, nodes))
            keepers = [asyncio.create_task(keep(group)) for group in groups]
            done, pending = await asyncio.wait((stopping, *keepers), return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            for task in done:
                task.result()
        finally:
            await server.stop(FAREWELL_S)
            for group in groups:
                group.supervisor.stop()
            if timers is not None:
                timers.close()


def main() -> None:
    run("lockstep-worker", WorkerSettings, serve)


if __name__ == "__main__":
    main()
