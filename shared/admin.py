"""The admin port of a service: probes, metrics, pages for people, on threads that a starving event loop can neither fake nor block.

/livez     200 while the service gets ahead: its event loop ticks, and what it waits for is not overdue. Busy is not dead.
/readyz    200 while it is live and can take work, else 503 with the reason; an event loop that is stuck is told sooner than at /livez.
/metrics   Prometheus' text format, or OpenMetrics for those who accept it.
/debug/... what a service has to tell beside them, as JSON.
"""

import asyncio
import contextlib
import json
import logging
import socket
import socketserver
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Histogram, make_wsgi_app

from shared.errors import LockstepError
from shared.metrics import LOOP_LAG_BUCKETS
from shared.settings import Settings

logger = logging.getLogger(__name__)

BEAT_EVERY_S = 0.02  # short, so that no stall that a client could notice falls between two beats
STALLED_S = 10.0  # an event loop that has not run for this long is stuck; a busy one comes round many times a second
UNREADY_S = 5.0  # and after this long gets no new work: traffic goes elsewhere before the process is ended
MAX_CONNECTIONS = 32  # beyond them the oldest is cut off, so that those who open and say nothing do not keep probes out
SOCKET_TIMEOUT_S = 5.0
STOP_POLL_S = 0.05  # how soon the server notices that it should stop

OPENMETRICS = "application/openmetrics-text"
# Asked for OpenMetrics with any other escaping, the client library writes the colon of `vllm:` as an underscore, in sample lines
# alone. All our names are valid without escaping, so it is never needed.
OPENMETRICS_AS_IT_IS = f"{OPENMETRICS}; version=1.0.0; escaping=allow-utf-8"

Page = Callable[[], object]  # what JSON can hold; called from threads of the admin server
NO_PAGES: Mapping[str, Page] = MappingProxyType({})
Probe = Callable[[], str | None]  # None when all is well, else what is not; called from threads of the admin server


class Heartbeat:
    """Of an event loop: `beat` runs on it, whoever calls the heartbeat learns whether it still does."""

    def __init__(self, registry: CollectorRegistry, stalled_s: float = STALLED_S, unready_s: float = UNREADY_S) -> None:
        self._stalled_s, self._unready_s = stalled_s, unready_s
        self._lag = Histogram(
            "lockstep_event_loop_lag_seconds",
            "How late the event loop ran a timer: what everything on it had to wait.",
            buckets=LOOP_LAG_BUCKETS,
            registry=registry,
        )
        self._at = time.monotonic()

    async def beat(self) -> None:
        """Until cancelled."""
        while True:
            self._at = time.monotonic()
            await asyncio.sleep(BEAT_EVERY_S)
            self._lag.observe(max(time.monotonic() - self._at - BEAT_EVERY_S, 0.0))

    def __call__(self) -> str | None:
        """Whether it lives."""
        return self._silent(self._stalled_s)

    def ready(self) -> str | None:
        """Whether it may be given something to do."""
        return self._silent(self._unready_s)

    def _silent(self, most_s: float) -> str | None:
        silent_s = time.monotonic() - self._at
        return f"the event loop has not run for {silent_s:.1f} s" if silent_s > most_s else None


class AdminServer:
    """Listens from the start, answers from `start` on."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        live: Sequence[Probe],
        ready: Sequence[Probe],
        pages: Mapping[str, Page] = NO_PAGES,
    ) -> None:
        """live: all must be well, and to be ready `ready`, too. pages: by path. port: 0 lets the kernel pick.

        Raises LockstepError when the port cannot be had.
        """
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise LockstepError(f"admin_port: cannot listen on {host}:{port}: {error}") from error
        self._server.set_app(_application(registry, live, ready, pages))
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(STOP_POLL_S,), name="admin", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns once nobody listens any more."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.asynccontextmanager
async def admin(
    settings: Settings, registry: CollectorRegistry, ready: Probe, progress: Probe | None = None, pages: Mapping[str, Page] = NO_PAGES
) -> AsyncIterator[int]:
    """Answers on `admin_port` while the block runs, and yields the port.

    progress: what else than the event loop must get ahead. pages: by path. Raises LockstepError when the port cannot be had.
    """
    heartbeat = Heartbeat(registry)
    live = (heartbeat, progress) if progress else (heartbeat,)
    server = AdminServer(settings.host, settings.admin_port, registry, live, (heartbeat.ready, ready), pages)
    beating = asyncio.create_task(heartbeat.beat())
    server.start()
    try:
        yield server.port
    finally:
        beating.cancel()
        await asyncio.to_thread(server.stop)


def _application(
    registry: CollectorRegistry, live: Sequence[Probe], ready: Sequence[Probe], pages: Mapping[str, Page]
) -> Callable[..., Iterable[bytes]]:
    """The WSGI application."""
    metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET":
            return text("405 Method Not Allowed", "only GET\n", start_response)
        match environ["PATH_INFO"]:
            case "/metrics":
                if OPENMETRICS in environ.get("HTTP_ACCEPT", ""):
                    environ["HTTP_ACCEPT"] = OPENMETRICS_AS_IT_IS
                return metrics(environ, start_response)  # type: ignore[no-any-return]
            case "/livez":
                return probe(live, start_response)
            case "/readyz":
                return probe((*live, *ready), start_response)
            case path if path in pages:
                return text("200 OK", json.dumps(pages[path](), indent=1) + "\n", start_response, "application/json")
            case _:
                return text("404 Not Found", ", ".join(("/livez", "/readyz", "/metrics", *pages)) + "\n", start_response)

    def probe(probes: Sequence[Probe], start_response: Callable[..., object]) -> Iterable[bytes]:
        reasons = dict.fromkeys(reason for reason in (each() for each in probes) if reason is not None)  # each once
        if reasons:
            return text("503 Service Unavailable", "; ".join(reasons) + "\n", start_response)
        return text("200 OK", "ok\n", start_response)

    def text(status: str, body: str, start_response: Callable[..., object], kind: str = "text/plain; charset=utf-8") -> Iterable[bytes]:
        start_response(status, [("Content-Type", kind), ("Cache-Control", "no-store")])
        return [body.encode()]

    def guarded(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        try:
            return answer(environ, start_response)
        except Exception:  # the edge: what a caller sends, or a defect, costs one answer
            logger.exception("admin port: %s failed", environ["PATH_INFO"])
            return text("500 Internal Server Error", "this failed; the log says why\n", start_response)

    return guarded


class _Handler(WSGIRequestHandler):
    timeout = SOCKET_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("admin port: " + format, *args)  # probes and scrapes come every few seconds


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._open: dict[socket.socket, None] = {}  # oldest first
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # not HTTPServer's, which asks a name server for the host's name
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            if len(self._open) > MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):  # the other side may have closed it
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("admin port: a connection of %s broke", client_address, exc_info=True)
