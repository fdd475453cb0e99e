"""The HTTP application: routes, request ids, and errors in one shape."""

import asyncio
import importlib.metadata
import json
import logging
import re
import time
import uuid

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.access import Access
from services.gateway.errors import ClientGone, InvalidRequest, MethodNotAllowed, NotFound, Overloaded, RequestError, Unauthorized
from services.gateway.generation import RETRY_AFTER_S
from services.gateway.metrics import CLIENT_CLOSED_REQUEST, GatewayMetrics
from services.gateway.openai import chat, completions, models, tokens
from services.gateway.openai.document import document
from services.gateway.openai.errors import error_response, status_of
from services.gateway.openai.service import Gateway
from services.gateway.page import routes as page
from services.gateway.settings import GatewaySettings
from services.gateway.status import Status
from shared import logging as logs

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[0-9A-Za-z._:/+=-]{1,128}")  # others are replaced: they end in headers and logs


def create_app(gateway: Gateway, access: Access) -> ASGIApp:
    """The application of a gateway."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.state.gateway = gateway
    for module in (chat, completions, models, tokens):
        app.include_router(module.router)
    if gateway.settings.page:
        app.include_router(page.router())
    app.add_api_route("/status", Status(gateway).answer, methods=["GET"])
    described = json.dumps(document(gateway.settings.served_model_name))
    app.add_api_route("/openapi.json", lambda: Response(described, media_type="application/json"), methods=["GET"])
    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/version", version, methods=["GET"])
    app.add_exception_handler(RequestError, request_error)
    app.add_exception_handler(HTTPException, routing_error)
    app.add_exception_handler(Exception, unexpected_error)
    edge = Edge(app, gateway.settings, gateway.metrics, access)
    if not gateway.settings.cors_origins:
        return edge
    return CORSMiddleware(
        edge,
        allow_origins=gateway.settings.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # OpenAI's client sends a dozen of its own, x-stainless-os and so on
        allow_private_network=True,  # browsers ask for leave when a page of the public internet calls an address within
        expose_headers=["X-Request-Id", "Retry-After"],
    )


async def health(request: Request) -> dict[str, str]:
    """200 while requests can be served."""
    _ = Gateway.of(request).scheduler.ready_model
    return {"status": "ok"}


async def version() -> dict[str, str]:
    """Of Lockstep."""
    return {"version": importlib.metadata.version("lockstep")}


async def request_error(request: Request, error: Exception) -> Response:
    """The answer to a request that failed in a way of ours."""
    if isinstance(error, ClientGone):
        raise error
    if status_of(error) == 500:
        logger.error("request %s failed: %s", request.state.request_id, error)
    return error_response(error)


async def routing_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods: what FastAPI raises itself."""
    assert isinstance(error, HTTPException)
    kind = {404: NotFound, 405: MethodNotAllowed}.get(error.status_code, InvalidRequest)
    headers = {name: value.replace("GET", "GET, HEAD") for name, value in (error.headers or {}).items()}
    return error_response(kind(f"Invalid URL ({request.method} {request.url.path[:200]})"), headers)


async def unexpected_error(request: Request, error: Exception) -> Response:
    """The answer to what nobody foresaw; the framework raises it again, and the edge logs it."""
    return error_response(error)


class Edge:
    """The outermost layer: gives each request its id, asks for its key, bounds their number, counts and logs each, answers what nobody
    else caught."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, metrics: GatewayMetrics, access: Access) -> None:
        self._app = app
        self._metrics = metrics
        self._access = access
        self._max_requests, self._timeout_s = settings.max_requests, settings.timeout_s
        self._running = 0  # POST requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        logs.bind(request_id=request_id)
        state["deadline"] = asyncio.get_running_loop().time() + self._timeout_s
        state["metrics"] = metrics = self._metrics.request(scope["path"])
        state["send"] = send  # for what follows the start of an answer, which is all that the layers inside look at
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        work = int(scope["method"] == "POST")
        self._running += work
        limited = None  # the key whose limits the request counts for
        try:
            key = self._access.key_of(scope)
            state["tenant"] = key.owner if key else ""
            if key is not None:
                logs.bind(key=key.name)
            if work and self._running > self._max_requests:
                raise Overloaded("too many requests: try again later", code="rate_limit_exceeded", retry_after_s=RETRY_AFTER_S)
            if work and key is not None:
                self._access.limits.begin(key, time.monotonic())
                limited = key
            # The connection leaves out the body of what answers HEAD, which load balancers and monitors send.
            await self._app({**scope, "method": "GET"} if scope["method"] == "HEAD" else scope, receive, send_with_id)
            if gone := state.get("client_gone"):
                raise gone
        except (Overloaded, Unauthorized) as error:
            await error_response(error)(scope, receive, send_with_id)
        except ClientGone as error:
            logger.info("request %s: %s", request_id, error)
            status = CLIENT_CLOSED_REQUEST
        except Exception as error:  # the edge of the service: logs, answers and ends
            logger.exception("request %s failed", request_id)
            if not status:
                await error_response(error)(scope, receive, send_with_id)
        finally:
            self._running -= work
            usage = state.get("usage")
            if usage:
                metrics.used(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
            if limited is not None:
                self._access.limits.end(limited, usage.prompt_tokens + usage.completion_tokens if usage else 0, time.monotonic())
            metrics.ended(status)
            _log(scope, status, time.monotonic() - metrics.begun_at)
            del state["send"]  # which leads back to the scope: a cycle would keep all of the request until the garbage collector comes


def _log(scope: Scope, status: int, seconds: float) -> None:
    """One line, with nothing in it that a client could shape: no text, and control characters escaped."""
    usage, model = scope["state"].get("usage"), scope["state"].get("model")
    tokens = f", {usage.prompt_tokens} + {usage.completion_tokens} tokens of {model}" if usage else ""
    path = scope["path"][:200].encode("unicode_escape").decode()
    level = logging.INFO if scope["method"] == "POST" else logging.DEBUG  # probes come every few seconds
    logger.log(level, "%s %s -> %d in %.3f s%s", scope["method"], path, status, seconds, tokens)
