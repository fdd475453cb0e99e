"""What the routes share: the gateway behind them, and how a request is read."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from services.gateway.chat.output import Dialect
from services.gateway.chat.renderer import Renderer
from services.gateway.errors import BodyTooLarge, BodyTooSlow, ClientGone, InvalidRequest, ModelNotFound, Overloaded, TimedOut
from services.gateway.generation import RETRY_AFTER_S
from services.gateway.metrics import GatewayMetrics
from services.gateway.model import Model
from services.gateway.openai.schemas import GenerationRequest, ModelRequest
from services.gateway.openai.sending import JSON_TYPE, unless_client_leaves
from services.gateway.scheduler_client import SchedulerClient
from services.gateway.settings import GatewaySettings

T = TypeVar("T")
R = TypeVar("R", bound=ModelRequest)

READ_AT_ONCE_BYTES = 1 << 14  # of a body: some 5 ms, if it is all small objects; what is larger is read in a thread


@dataclass
class Bodies:
    """Request bodies that are being read, or whose prompts wait for a thread."""

    bytes: int = 0


@dataclass(frozen=True)
class Gateway:
    """What the routes share; kept in `app.state.gateway`."""

    settings: GatewaySettings
    scheduler: SchedulerClient
    threads: Executor  # for tokenisers
    renderer: Renderer
    created: int  # Unix time, told of every model
    metrics: GatewayMetrics
    bodies: Bodies = field(default_factory=Bodies)

    @classmethod
    def of(cls, request: Request) -> "Gateway":
        """The gateway that serves the request."""
        gateway = request.app.state.gateway
        assert isinstance(gateway, cls)
        return gateway

    def check_name(self, name: str) -> None:
        """Raises ModelNotFound unless a model is served under this name."""
        if name not in self.settings.served_model_name:
            raise ModelNotFound(f"the model '{name[:100]}' does not exist", code="model_not_found")

    def dialect(self, model: Model) -> Dialect:
        """How the model's answers are read."""
        return Dialect.of(model.tokenizer.chat_template, self.settings.tool_parser, self.settings.reasoning_parser)

    async def in_thread(self, request: Request, function: Callable[..., T], *arguments: object) -> T:
        """Runs what takes long enough to hold up other requests; not, if the client leaves before its turn. Raises ClientGone, TimedOut."""
        work = asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)
        self.bodies.bytes += request.state.body_bytes
        try:
            async with asyncio.timeout_at(request.state.deadline):
                return await unless_client_leaves(request.receive, work)
        except TimeoutError as error:
            raise TimedOut("the request took too long") from error
        finally:
            self.bodies.bytes -= request.state.body_bytes


async def read_body(request: Request) -> bytes:
    """The whole body. Raises InvalidRequest unless it says that it is plain JSON; BodyTooLarge as soon as that is known; BodyTooSlow."""
    gateway = Gateway.of(request)
    limit = gateway.settings.max_body_bytes
    kind = request.headers.get("content-type", JSON_TYPE).split(";")[0].strip().lower()
    if kind != JSON_TYPE:
        raise InvalidRequest(f"unsupported content type '{kind[:50]}': send {JSON_TYPE}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":  # a small body could unpack to a huge one
        raise InvalidRequest(f"unsupported content encoding '{encoding[:50]}': send the body as it is")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limit:
        raise BodyTooLarge(f"the body has {int(announced)} bytes, the limit is {limit}")
    body = bytearray()
    try:
        async with asyncio.timeout(gateway.settings.body_timeout_s):
            async for chunk in request.stream():
                body += chunk
                gateway.bodies.bytes += len(chunk)
                if len(body) > limit:
                    raise BodyTooLarge(f"the body has more than {limit} bytes")
                if gateway.bodies.bytes > gateway.settings.max_bodies_bytes:
                    raise Overloaded("too many requests: try again later", code="rate_limit_exceeded", retry_after_s=RETRY_AFTER_S)
    except TimeoutError as error:
        raise BodyTooSlow(f"the body did not come within {gateway.settings.body_timeout_s:g} s") from error
    except ClientDisconnect as error:
        raise ClientGone("the client left while it sent its request") from error
    finally:
        gateway.bodies.bytes -= len(body)
    request.state.body_bytes = len(body)
    return bytes(body)


async def opened(request: Request, read: Callable[[bytes], R]) -> tuple[Gateway, R, Model]:
    """The first steps of every route with a body: it is read and checked, and it is for the model that is served now.

    Raises InvalidRequest, ModelNotFound, Unavailable, and what `read_body` and `in_thread` do.
    """
    gateway = Gateway.of(request)
    data = await read_body(request)
    body = read(data) if len(data) <= READ_AT_ONCE_BYTES else await gateway.in_thread(request, read, data)
    if body.model is not None:
        gateway.check_name(body.model)
    request.state.model = body.model or gateway.settings.served_model_name[0]
    request.state.metrics.accepted(isinstance(body, GenerationRequest) and body.stream)
    return gateway, body, gateway.scheduler.ready_model
