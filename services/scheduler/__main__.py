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
from shared.addresses import host_port, reachable
from shared.admin import admin
from shared.metrics import new_registry
from shared.process import settle_heap, write_ports
from shared.protocol.generation_pb2_grpc import add_GenerationServicer_to_server
from shared.protocol.plan import Limits, Plan
from shared.rpc import SERVER_OPTIONS, start_server
from shared.service import run
from shared.tracing import tracing

logger = logging.getLogger("services.scheduler")

TICK_S = 0.1  # how late a deadline may be noticed
SETTLE_S = 5.0  # for what is on its way from workers when we stop: a lead and a step, often milliseconds
SETTLED_EVERY_S = 0.005
STOP_S = 1.0  # for what is on its way to gateways

Follow = Callable[[Callable[[Endpoints], None]], Coroutine[object, object, None]]


async def serve(settings: SchedulerSettings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set. Raises LockstepError when a port is taken."""
    async with tracing("lockstep-scheduler", settings.trace_endpoint, settings.trace_ratio) as tracer, _surroundings(settings) as around:
        await SchedulerProcess(settings, stop, History(tracer, settings.log_requests), *around).run()


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


class SchedulerProcess:
    """One scheduler from its start to its end: it answers, waits until it leads, leads, and hands over."""

    def __init__(self, settings: SchedulerSettings, stop: asyncio.Event, history: History, lease: Lease, follow: Follow | None) -> None:
        """follow: tells of the workers that come and go, where any are discovered."""
        self._settings, self._stop, self._follow = settings, stop, follow
        self._leadership = Leadership(lease)
        self._registry = new_registry("scheduler")
        self._metrics = SchedulerMetrics(
            settings.served_model_name, settings.vllm_names, self._registry, settings.slo_ttft_s, settings.slo_itl_s
        )
        self._metrics.watch_leadership(lambda: self._leadership.leads)
        self._generation = GenerationService(settings, self._leadership, self._metrics, history)
        self._scheduler = self._generation.scheduler
        self._health = health.aio.HealthServicer()
        self._changed = asyncio.Event()  # a group has come or gone
        self._changed.set()

    async def run(self) -> None:
        """Until `stop` is set. Raises LockstepError when a port is taken, or for what else ends a scheduler."""
        settings = self._settings
        server = grpc.aio.server(options=SERVER_OPTIONS)
        add_GenerationServicer_to_server(self._generation, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        pages = {
            "/debug/requests": lambda: self._scheduler.requests_page(time.monotonic()),
            "/debug/groups": lambda: groups_page(self._scheduler.groups),
        }
        async with admin(settings, self._registry, self._unready, pages=pages) as admin_port:
            try:
                port = await start_server(server, settings.host, settings.port, settings.tls_folder)
                if settings.ports_file is not None:
                    write_ports(settings.ports_file, {"grpc": port, "admin": admin_port})
                settle_heap()
                logger.info("listening on %s:%d", settings.host, port)
                await self._work(host_port(settings.advertise_host or reachable(settings.host), port))
            finally:
                await server.stop(STOP_S)

    async def _work(self, address: str) -> None:
        """address: of ours, for the other schedulers."""
        running = asyncio.create_task(_together([self._tell_health(), self._lead(address)]))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if self._stop.is_set():
            self._changed.set()  # so that its health tells
            await self._settle()
        self._generation.end_sessions()
        for task in (running, stopping):
            task.cancel()
        await asyncio.wait((running, stopping))
        if not running.cancelled():
            running.result()  # what ended us
        await self._leadership.release()

    def _unready(self) -> str | None:
        """What it waits for, if anything; callable from any thread."""
        if self._stop.is_set():
            return "stopping"
        if not self._leadership.leads:  # to stand by is what it is there for
            return None
        return None if any(not each.draining for each in self._scheduler.groups) else "no worker group is ready"

    async def _tell_health(self) -> None:
        status = health_pb2.HealthCheckResponse
        while True:
            await self._changed.wait()
            self._changed.clear()
            serving = self._leadership.leads and not self._unready()
            for name in ("", "lockstep.v1.Generation"):
                await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def _lead(self, address: str) -> None:
        """Once it may, until it does not any more."""
        await self._leadership.acquire(address)
        workers = Workers(self._worker)
        for target in self._settings.worker:
            workers.add(target)
        works = [self._tick(), self._leadership.hold(), self._keep(workers)]
        if self._follow is not None:
            works.append(self._follow(workers.follow))
        await _together(works)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._scheduler.tick(time.monotonic())

    async def _keep(self, workers: Workers) -> None:
        try:
            await workers.run()
        finally:
            # Whatever ends us: while one stream after the other is closed, no request moves on to the next and back to its client as lost.
            self._scheduler.pause()
            self._generation.end_sessions()
            await workers.close()

    async def _settle(self) -> None:
        """Nothing is lost that has been computed: the next leader goes on after it."""
        self._scheduler.pause()
        until = time.monotonic() + SETTLE_S
        while not self._scheduler.settled and time.monotonic() < until:
            await asyncio.sleep(SETTLED_EVERY_S)

    def _worker(self, target: str, name: str | None) -> Worker:
        settings = self._settings
        return Worker(
            target, self._scheduler, self._leadership, self._group, settings.plan_deadline_s, self._changed.set, settings.tls_folder, name
        )

    def _group(
        self,
        name: str,
        limits: Limits,
        highest_slot_epoch: int,
        send: Callable[[Plan], None],
        wake: Callable[[float], None],
        health: Health,
    ) -> Group:
        settings = self._settings
        return Group(
            name,
            limits,
            highest_slot_epoch,
            settings.max_step_tokens,
            settings.overlap,
            send,
            self._scheduler.deliver,
            self._metrics.engine(name),
            bursts=settings.bursts,
            jump=settings.jump,
            policy=settings.policy,
            prefix_cache=settings.prefix_cache,
            wake=wake,
            health=health,
        )


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
