"""Runs the gateway: HTTP on one side, the session with the scheduler on the other."""

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import uvicorn
from opentelemetry.trace import Tracer
from starlette.types import ASGIApp

from services.gateway.access import Access
from services.gateway.app import create_app
from services.gateway.chat.renderer import Renderer
from services.gateway.connection import Connection
from services.gateway.keys import KeyRing
from services.gateway.limits import Limits
from services.gateway.metrics import GatewayMetrics
from services.gateway.openai.service import Gateway
from services.gateway.page.routes import PATHS as PAGE_PATHS
from services.gateway.scheduler_client import SchedulerClient
from services.gateway.settings import GatewaySettings
from services.gateway.traced import Traced
from shared.admin import admin
from shared.errors import LockstepError
from shared.metrics import new_registry
from shared.process import write_ports
from shared.tracing import tracing

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset(("/health",))  # that need no key
BACKLOG = 2048
LEAVE_S = 0.5  # for the scheduler to end the session that we have ended
LAST_WORDS_S = 5  # for the errors of answers that were not done in time
KEEP_ALIVE_S = 75  # of an idle connection: longer than load balancers and clients keep one, so that they close first


class Server(uvicorn.Server):
    """uvicorn, with signals left to shared.service."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: GatewaySettings, stop: asyncio.Event, limits: Limits | None = None, *, shares_port: bool = False) -> None:
    """Serves until `stop` is set and running answers have ended; those that take longer than `drain_s` end with an error.

    limits: what keys use, when other processes count too. shares_port: they listen there as well.
    """
    listener = listen(settings.host, settings.port, shares_port)
    # A client that takes nothing, dead or not, keeps neither a connection nor what waits for it longer than a request may take.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(settings.timeout_s * 1e3))
    keys = KeyRing(settings.api_keys) if settings.api_keys is not None else None
    if keys is None:
        logger.warning("no API keys: whoever reaches %s can use it; --api-keys names a file of them", settings.host)
    access = Access(keys, limits or Limits(), OPEN_PATHS | (PAGE_PATHS if settings.page else frozenset()))
    registry = new_registry("gateway")
    schedulers = ",".join(settings.scheduler)
    metrics = GatewayMetrics(settings.served_model_name[0], schedulers, registry, settings.slo_ttft_s, settings.slo_itl_s)
    scheduler = SchedulerClient(
        settings.scheduler,
        settings.max_unread_tokens,
        settings.scheduler_wait_s,
        metrics.resubmitted,
        settings.tls_folder,
        apply_generation_config=settings.generation_config == "apply",
    )
    metrics.watch(lambda: scheduler.is_up)

    def readiness() -> str | None:
        if stop.is_set():
            return "stopping"
        return None if scheduler.is_up else f"no session with the scheduler at {schedulers}"

    traces = tracing("lockstep-gateway", settings.trace_endpoint, settings.trace_ratio)
    async with admin(settings, registry, readiness) as admin_port, traces as tracer:
        if settings.ports_file is not None:
            write_ports(settings.ports_file, {"http": listener.getsockname()[1], "admin": admin_port})
        with Renderer(settings.tokenizer_threads) as renderer, ThreadPoolExecutor(settings.tokenizer_threads, "tokenizer") as threads:
            threads.submit(renderer.warm_up)
            gateway = Gateway(settings, scheduler, threads, renderer, created=int(time.time()), metrics=metrics)
            await _serve_http(stop, listener, gateway, access, tracer)


async def _serve_http(stop: asyncio.Event, listener: socket.socket, gateway: Gateway, access: Access, tracer: Tracer) -> None:
    settings = gateway.settings
    server = _server(settings, Traced(create_app(gateway, access), tracer))
    following = asyncio.create_task(access.keys.follow() if access.keys else stop.wait())
    session = asyncio.create_task(gateway.scheduler.run())
    http = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((session, http, stopping, following), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await asyncio.wait((http,), timeout=settings.drain_s)
        gateway.scheduler.leave()
        if gateway.scheduler.is_up:
            await asyncio.wait((session,), timeout=LEAVE_S)
        session.cancel()  # with it ends what still runs
        await http
    finally:
        for task in (session, http, stopping, following):
            task.cancel()
        results = await asyncio.gather(session, http, stopping, following, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):  # not a cancellation: what ended us
            raise result


def _server(settings: GatewaySettings, app: ASGIApp) -> Server:
    return Server(
        uvicorn.Config(
            app,
            loop="none",  # shared.service has started uvloop
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(settings.drain_s) + LAST_WORDS_S,
        )
    )


def listen(host: str, port: int, shares_port: bool = False) -> socket.socket:
    """A socket that takes connections. Raises LockstepError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=shares_port)
    except OSError as error:
        raise LockstepError(f"port: cannot listen on {host}:{port}: {error}") from error
