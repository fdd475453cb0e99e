"""What both endpoints do with a request: read it, submit its prompts, answer at once or as a stream."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from services.gateway.answer import Answer, Choice, Delta
from services.gateway.errors import BodyTooLarge, BodyTooSlow, ClientGone, InvalidRequest, ModelNotFound, Overloaded, TimedOut
from services.gateway.generation import RETRY_AFTER_S
from services.gateway.metrics import GatewayMetrics
from services.gateway.model import Model
from services.gateway.openai.schemas import GenerationRequest
from services.gateway.openai.sse import EventStream, unless_client_leaves
from services.gateway.scheduler_client import SchedulerClient
from services.gateway.settings import GatewaySettings
from shared.protocol.generation_pb2 import Sampling, Submit
from shared.protocol.plan import ids_to_bytes

T = TypeVar("T")
JSON = dict[str, Any]
JSON_TYPE = "application/json"


@dataclass
class Bodies:
    """Request bodies that are being read."""

    bytes: int = 0


@dataclass(frozen=True)
class Gateway:
    """What the routes share; kept in `app.state.gateway`."""

    settings: GatewaySettings
    scheduler: SchedulerClient
    threads: Executor  # for templates and tokenisers
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

    def accept(self, body: GenerationRequest, request: Request) -> None:
        """The request is for a model of ours. Raises ModelNotFound otherwise."""
        self.check_name(body.model)
        request.state.model = body.model
        request.state.metrics.accepted(body.stream)

    async def in_thread(self, request: Request, function: Callable[..., T], *arguments: object) -> T:
        """Runs what takes long enough to hold up other requests; not, if the client leaves before its turn. Raises ClientGone, TimedOut."""
        work = asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)
        try:
            async with asyncio.timeout_at(request.state.deadline):
                return await unless_client_leaves(request.receive, work)
        except TimeoutError as error:
            raise TimedOut("the request took too long") from error


class Format(Protocol):
    """How an endpoint writes its answers."""

    prompt_field: str

    def body(self, answer: Answer, texts: Sequence[str]) -> JSON: ...

    def chunks(self, deltas: AsyncIterator[Delta | None], answer: Answer) -> AsyncIterator[JSON | None]: ...


async def read_body(request: Request) -> bytes:
    """The whole body. Raises InvalidRequest unless it says that it is JSON; BodyTooLarge as soon as that is known; BodyTooSlow."""
    gateway = Gateway.of(request)
    limit = gateway.settings.max_body_bytes
    kind = request.headers.get("content-type", JSON_TYPE).split(";")[0].strip().lower()
    if kind != JSON_TYPE:
        raise InvalidRequest(f"unsupported content type '{kind[:50]}': send {JSON_TYPE}")
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
    return bytes(body)


def submits(
    body: GenerationRequest, model: Model, prompts: Sequence[list[int]], max_tokens: int | None, param: str, request: Request
) -> list[Submit]:
    """A message for each prompt. `max_tokens` None: to the end of the context.

    Raises InvalidRequest, of `param` where a prompt does not fit.
    """
    _check_ids("stop_token_ids", body.stop_token_ids, model)
    sampling = Sampling(
        temperature=body.temperature, top_p=body.top_p, min_p=body.min_p, seed=secrets.randbits(63) if body.seed is None else body.seed
    )
    if body.top_k > 0:
        sampling.top_k = body.top_k
    messages = []
    for prompt in prompts:
        _check_ids(param, prompt, model)
        room = model.max_length - len(prompt)
        wanted = room if max_tokens is None else max_tokens
        if room < (1 if max_tokens is None else max_tokens):
            asked = f"{len(prompt)} tokens of prompt" + (f" and {wanted} of completion" if max_tokens else "")
            message = f"this model's context has {model.max_length} tokens, you asked for {asked}"
            raise InvalidRequest(message, param, "context_length_exceeded")
        if body.min_tokens > wanted:
            raise InvalidRequest(f"min_tokens={body.min_tokens} is more than the {wanted} tokens at most", "min_tokens", "invalid_value")
        messages.append(
            Submit(
                request_id=request.state.request_id,
                prompt_ids=ids_to_bytes(prompt),
                sampling=sampling,
                max_tokens=wanted,
                min_tokens=body.min_tokens,
                ignore_eos=body.ignore_eos,
                stop_token_ids=ids_to_bytes(body.stop_token_ids),
                deadline_ms=max(int((request.state.deadline - asyncio.get_running_loop().time()) * 1000), 1),
            )
        )
    return messages


async def respond(request: Request, body: GenerationRequest, model: Model, messages: Sequence[Submit], form: Format) -> Response:
    """Submits, and answers when it is clear that there is an answer: what goes wrong before that is an HTTP error."""
    answer = _submit(body, model, messages, request)
    try:
        deltas = answer.deltas()
        if not body.stream:
            texts = await unless_client_leaves(request.receive, _texts(deltas, len(messages)))
            request.state.usage = answer.usage
            return JSONResponse(form.body(answer, texts))
        first = await unless_client_leaves(request.receive, anext(deltas))
    except BaseException as error:
        answer.close()
        if isinstance(error, InvalidRequest):  # the scheduler's refusals concern the prompt
            error.param = error.param or form.prompt_field
        raise
    return EventStream(form.chunks(_chained(first, deltas), answer), answer, request)


def _submit(body: GenerationRequest, model: Model, messages: Sequence[Submit], request: Request) -> Answer:
    gateway, metrics = Gateway.of(request), request.state.metrics
    terminal_ids = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else model.eos_ids)
    wake = asyncio.Event()
    choices: list[Choice] = []
    try:
        for index, message in enumerate(messages):
            generation = gateway.scheduler.submit(message, wake)
            choices.append(Choice(index, generation, model.tokenizer.detokenizer(), body.stops, terminal_ids))
    except BaseException:
        for choice in choices:
            choice.generation.close()
        raise
    return Answer(choices, wake, gateway.settings.keep_alive_s, request.state.deadline, metrics.tokens, metrics.sent)


async def _texts(deltas: AsyncIterator[Delta | None], choices: int) -> list[str]:
    texts = [""] * choices
    async for delta in deltas:
        if delta is not None:
            texts[delta.index] += delta.text
    return texts


async def _chained(first: Delta | None, rest: AsyncIterator[Delta | None]) -> AsyncIterator[Delta | None]:
    yield first
    async for delta in rest:
        yield delta


def _check_ids(param: str, ids: list[int], model: Model) -> None:
    """Raises InvalidRequest for an id that has no row in the model's embedding."""
    if ids and not 0 <= min(ids) <= max(ids) < model.vocab_size:
        bad = next(each for each in ids if not 0 <= each < model.vocab_size)
        raise InvalidRequest(f"token id {str(bad)[:50]} is not from 0 to {model.vocab_size - 1}", param, "invalid_value")


def head(prefix: str, kind: str, body: GenerationRequest, model: Model) -> JSON:
    """What an answer and all its chunks have in common."""
    return {
        "id": f"{prefix}-{secrets.token_hex(16)}",
        "object": kind,
        "created": int(time.time()),
        "model": body.model,
        "system_fingerprint": f"fp_{model.fingerprint[:10]}",
    }


def usage(answer: Answer) -> JSON:
    """The usage object."""
    counts = answer.usage
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
