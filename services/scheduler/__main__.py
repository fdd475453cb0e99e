"""`python -m services.scheduler`: gRPC for gateways on one side, streams to the workers on the other."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.scheduler.connection import Worker
from services.scheduler.debug import groups_page
from services.scheduler.file_lease import FileLease
from services.scheduler.group import Group
from services.scheduler.health import Health
from services.scheduler.history import History
from services.scheduler.leadership import Leadership, Lease, NoLease
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.server import GenerationService
from services.scheduler.settings import SchedulerSettings
from services.scheduler.workers import Endpoints, Workers
from shared.admin import admin
from shared.metrics import new_registry
from shared.process import settle_heap, write_ports
from shared.protocol.generation_pb2_grpc import add_GenerationServicer_to_server
from shared.protocol.plan import Limits, Plan
from shared.rpc import SERVER_OPTIONS, host_port, start_server
from shared.service import run
from shared.tracing import tracing

logger = logging.getLogger("services.scheduler")

ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where to reach what listens everywhere
TICK_S = 0.1  # how late a deadline may be noticed
SETTLE_S = 5.0  # for what is on its way from workers when we stop: a lead and a step, often milliseconds
SETTLED_EVERY_S = 0.005
STOP_S = 1.0  # for what is on its way to gateways


Follow = Callable[[Callable[[Endpoints], None]], Coroutine[object, object, None]]


async def serve(settings: SchedulerSettings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set. Raises LockstepError when a port is taken."""
    async with tracing("lockstep-scheduler", settings.trace_endpoint, settings.trace_ratio) as tracer, _surroundings(settings) as around:
        await _serve(settings, stop, History(tracer, settings.log_requests), *around)


@asynccontextmanager
async def _surroundings(settings: SchedulerSettings) -> AsyncIterator[tuple[Lease, Follow | None]]:
    """The lease, and what follows the workers as they come and go, if anything does."""
    kind, _, place = settings.leadership.partition(":")
    times = settings.lease_duration_s, settings.lease_renewal_s, settings.tls_folder
    lease: Lease = FileLease(Path(place), *times) if kind == "file" else NoLease()
    if kind != "lease" and settings.worker_service is None:
        yield lease, None
        return
    # The client library is large: it is loaded where it is used.
    from services.scheduler.discovery import follow
    from services.scheduler.kubernetes_api import kubernetes_api
    from services.scheduler.kubernetes_lease import KubernetesLease

    async with kubernetes_api() as api:
        if kind == "lease":
            namespace, name = place.split("/")
            lease = KubernetesLease(api, namespace, name, *times)
        if settings.worker_service is None:
            yield lease, None
        else:
            namespace, name = settings.worker_service.split("/")
            yield lease, lambda on_change: follow(api, namespace, name, on_change)


async def _serve(settings: SchedulerSettings, stop: asyncio.Event, history: History, lease: Lease, follow: Follow | None) -> None:
    leadership = Leadership(lease)
    registry = new_registry("scheduler")
    metrics = SchedulerMetrics(settings.served_model_name, settings.vllm_names, registry, settings.slo_ttft_s, settings.slo_itl_s)
    metrics.watch_leadership(lambda: leadership.leads)
    generation = GenerationService(settings, leadership, metrics, history)
    scheduler = generation.scheduler
    healthy = health.aio.HealthServicer()
    changed = asyncio.Event()  # a group has come or gone
    changed.set()

    def readiness() -> str | None:
        if stop.is_set():
            return "stopping"
        if not leadership.leads:  # to stand by is what it is there for
            return None
        return None if any(not each.draining for each in scheduler.groups) else "no worker group is ready"

    async def tell_health() -> None:
        while True:
            await changed.wait()
            changed.clear()
            status = (
                health_pb2.HealthCheckResponse.NOT_SERVING
                if readiness() or not leadership.leads
                else health_pb2.HealthCheckResponse.SERVING
            )
            for name in ("", "lockstep.v1.Generation"):
                await healthy.set(name, status)

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            scheduler.tick(time.monotonic())

    async def with_workers(workers: Workers) -> None:
        try:
            await workers.run()
        finally:
            # Whatever ends us: while one stream after the other is closed, no request moves on to the next and back to its client as lost.
            scheduler.pause()
            generation.end_sessions()
            await workers.close()

    async def lead(address: str) -> None:
        await leadership.acquire(address)
        workers = Workers(worker)
        for target in settings.worker:
            workers.add(target)
        works = [tick(), leadership.hold(), with_workers(workers)]
        if follow is not None:
            works.append(follow(workers.follow))
        await _together(works)

    async def hand_over() -> None:
        """Nothing is lost that has been computed: the next leader goes on after it."""
        scheduler.pause()
        until = time.monotonic() + SETTLE_S
        while not scheduler.settled and time.monotonic() < until:
            await asyncio.sleep(SETTLED_EVERY_S)

    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_GenerationServicer_to_server(generation, server)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)

    def group(
        name: str, limits: Limits, highest_slot_epoch: int, send: Callable[[Plan], None], wake: Callable[[float], None], health: Health
    ) -> Group:
        return Group(
            name,
            limits,
            highest_slot_epoch,
            settings.max_step_tokens,
            settings.overlap,
            send,
            scheduler.deliver,
            metrics.engine(name),
            settings.bursts,
            settings.jump,
            settings.policy,
            settings.prefix_cache,
            wake,
            health,
        )

    def worker(target: str, name: str | None) -> Worker:
        return Worker(target, scheduler, leadership, group, settings.plan_deadline_s, changed.set, settings.tls_folder, name)

    pages = {
        "/debug/requests": lambda: scheduler.requests_page(time.monotonic()),
        "/debug/groups": lambda: groups_page(scheduler.groups),
    }
    async with admin(settings, registry, readiness, pages=pages) as admin_port:
        try:
            port = await start_server(server, settings.host, settings.port, settings.tls_folder)
            if settings.ports_file is not None:
                write_ports(settings.ports_file, {"grpc": port, "admin": admin_port})
            settle_heap()
            logger.info("listening on %s:%d", settings.host, port)
            running = asyncio.create_task(
                _together([tell_health(), lead(host_port(settings.advertise_host or ANYWHERE.get(settings.host, settings.host), port))])
            )
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                changed.set()  # so that its health tells
                await hand_over()
            generation.end_sessions()
            for task in (running, stopping):
                task.cancel()
            await asyncio.wait((running, stopping))
            if not running.cancelled():
                running.result()  # what ended us
            await leadership.release()
        finally:
            await server.stop(STOP_S)


async def _together(works: Sequence[Coroutine[object, object, None]]) -> None:
    """All of them, until one fails: then the others are cancelled, and its error is raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    run("lockstep-scheduler", SchedulerSettings, serve)


if __name__ == "__main__":
    main()
