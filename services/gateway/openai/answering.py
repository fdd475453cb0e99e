"""Submits the messages of a request, and answers at once or as a stream."""

import asyncio
import secrets
import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.gateway.answer import Answer, Choice
from services.gateway.errors import InvalidRequest
from services.gateway.model import Model
from services.gateway.openai.schemas import GenerationRequest
from services.gateway.openai.service import JSON, Gateway
from services.gateway.openai.sse import EventStream, Format, to_json, unless_client_leaves
from shared.protocol.generation_pb2 import Submit


async def respond(request: Request, body: GenerationRequest, model: Model, messages: Sequence[Submit], form: Format) -> Response:
    """The answer, once it is clear that there is one: what goes wrong before that is an HTTP error."""
    answer = _submit(body, model, messages, request)
    try:
        if not body.stream:
            texts = await unless_client_leaves(request.receive, _texts(answer))
            answer.close()
            request.state.usage = answer.usage
            return JSONResponse(form.body(answer, texts))
        first = await unless_client_leaves(request.receive, answer.next())
    except BaseException as error:
        answer.close()
        if isinstance(error, InvalidRequest):  # the scheduler's refusals concern the prompt
            error.param = error.param or form.prompt_field
        raise
    return EventStream(first, answer, form, request)


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
    return Answer(choices, body.n, wake, gateway.settings.keep_alive_s, request.state.deadline, metrics.tokens, metrics.sent)


async def _texts(answer: Answer) -> list[str]:
    texts = [""] * len(answer.choices)
    while not answer.finished:
        for delta in await answer.next():
            texts[delta.index] += delta.text
    return texts


def head(prefix: str, kind: str, body: GenerationRequest, model: Model) -> JSON:
    """What an answer and all its chunks have in common."""
    return {
        "id": f"{prefix}-{secrets.token_hex(16)}",
        "object": kind,
        "created": int(time.time()),
        "model": body.model,
        "system_fingerprint": f"fp_{model.fingerprint[:10]}",
    }


def chunk_opening(head: JSON) -> str:
    """The JSON of a chunk up to its one choice: the same for all of an answer, and built once, since chunks are many."""
    return f'{to_json(head)[:-1]},"choices":['


def chunk_ending(include_usage: bool) -> str:
    """The JSON of a chunk after its choice."""
    return '],"usage":null}' if include_usage else "]}"


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
