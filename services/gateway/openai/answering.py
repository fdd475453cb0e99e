"""Submits the messages of a request, and answers at once or as a stream."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.answer import Answer, Patience
from services.gateway.choice import Choice, Delta, Echo, FinishReason, ScoredToken
from services.gateway.errors import ClientGone, InvalidRequest, TimedOut
from services.gateway.model import Model
from services.gateway.openai.schemas import GenerationRequest
from services.gateway.openai.sending import JSON, json_response, to_json, unless_client_leaves
from services.gateway.openai.service import Gateway
from services.gateway.openai.sse import EventStream
from services.gateway.openai.submission import stop_ids
from shared.protocol.generation_pb2 import Submit


@dataclass
class Outcome:
    """A choice as a whole."""

    index: int
    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)  # where the request asks for log-probabilities
    finish_reason: FinishReason | None = None


class Format(Protocol):
    """How an endpoint writes its answers."""

    prompt_field: str
    shown: frozenset[str]  # special tokens that it wants to see

    def body(self, outcomes: Sequence[Outcome], answer: Answer) -> Iterator[str]:
        """JSON of the whole answer, in pieces."""

    def events(self, delta: Delta) -> str:
        """The events of what is new."""

    def closing(self, answer: Answer) -> str:
        """The events after the end of all choices."""


async def respond(
    request: Request,
    body: GenerationRequest,
    model: Model,
    messages: Sequence[Submit],
    form: Format,
    echoes: Sequence[Echo] = (),
) -> Response:
    """The answer, once it is clear that there is one: what goes wrong before that is an HTTP error. echoes: of the prompts."""
    shown = form.shown if body.skip_special_tokens else frozenset(model.tokenizer.special_ids)
    answer = _submit(body, model, messages, echoes, shown, request)
    try:
        if not body.stream:
            outcomes = await unless_client_leaves(request.receive, _outcomes(answer))
            answer.close()
            request.state.usage = answer.usage
            return json_response(form.body(_best(outcomes, answer, body), answer), request)
        first = await unless_client_leaves(request.receive, answer.next())
    except BaseException as error:
        answer.close()
        if isinstance(error, ClientGone | TimedOut):  # what was computed for nobody counts as well
            request.state.usage = answer.usage
        if isinstance(error, InvalidRequest):  # the scheduler's refusals concern the prompt
            error.param = error.param or form.prompt_field
        raise
    return EventStream(first, answer, form.events, form.closing, request)


def _submit(
    body: GenerationRequest, model: Model, messages: Sequence[Submit], echoes: Sequence[Echo], shown: frozenset[str], request: Request
) -> Answer:
    gateway, metrics = Gateway.of(request), request.state.metrics
    terminal_ids = frozenset(stop_ids(body, model)) | (frozenset() if body.ignore_eos else model.eos_ids)
    wake = asyncio.Event()
    choices: list[Choice] = []
    try:
        for index, message in enumerate(messages):
            generation = gateway.scheduler.submit(message, wake)
            detokenizer = model.tokenizer.detokenizer(shown)
            echo = echoes[index // body.candidates] if echoes else None
            if echo is not None and message.HasField("prompt_logprobs"):
                echo.scored_by = generation
            choices.append(Choice(index, generation, detokenizer, body.stops, terminal_ids, echo))
    except BaseException:
        for choice in choices:
            choice.generation.close()
        raise
    patience = Patience(gateway.settings.keep_alive_s, gateway.settings.first_token_timeout_s, gateway.settings.idle_timeout_s)
    return Answer(choices, body.candidates, wake, patience, request.state.deadline, metrics.tokens, metrics.sent)


async def _outcomes(answer: Answer) -> list[Outcome]:
    outcomes = [Outcome(choice.index) for choice in answer.choices]
    while not answer.finished:
        for delta in await answer.next():
            outcome = outcomes[delta.index]
            outcome.text += delta.text
            outcome.tokens += delta.tokens
            outcome.finish_reason = delta.finish_reason
    return outcomes


def _best(outcomes: list[Outcome], answer: Answer, body: GenerationRequest) -> list[Outcome]:
    """Of each prompt's candidates the `n` likeliest by token, the likeliest first."""
    if body.candidates == body.n:
        return outcomes
    best: list[Outcome] = []
    for start in range(0, len(outcomes), body.candidates):
        candidates = outcomes[start : start + body.candidates]
        best += sorted(candidates, key=lambda outcome: -answer.choices[outcome.index].mean_logprob)[: body.n]
    return [replace(outcome, index=index) for index, outcome in enumerate(best)]


def head(prefix: str, kind: str, body: GenerationRequest, model: Model) -> JSON:
    """What an answer and all its chunks have in common."""
    return {
        "id": f"{prefix}-{secrets.token_hex(16)}",
        "object": kind,
        "created": int(time.time()),
        "model": body.model,
        "system_fingerprint": f"fp_{model.fingerprint[:10]}",
    }


def opening(head: JSON) -> str:
    """The JSON of an answer or a chunk up to its choices: the same for all chunks of an answer, and built once, since they are many."""
    return f'{to_json(head)[:-1]},"choices":['


def whole(opening: str, choices: Iterator[str], usage: Callable[[], JSON]) -> Iterator[str]:
    """JSON of a whole answer, in pieces. choices: theirs. usage: asked when all of those have been taken."""
    yield opening
    yield from choices
    yield f'],"usage":{to_json(usage())}}}'


def chunk_ending(include_usage: bool) -> str:
    """The JSON of a chunk after its choice."""
    return '],"usage":null}' if include_usage else "]}"


def usage(answer: Answer, reasoning_tokens: int = 0) -> JSON:
    """The usage object."""
    counts = answer.usage
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
