"""POST /v1/completions, the legacy endpoint."""

from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.answer import Answer, Delta
from services.gateway.errors import InvalidRequest
from services.gateway.model import Model
from services.gateway.openai import service
from services.gateway.openai.schemas import CompletionRequest
from services.gateway.openai.service import JSON, Gateway
from services.gateway.openai.validation import check_completion, parse
from services.gateway.text.tokenizer import TextTokenizer

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continues one or several prompts."""
    gateway = Gateway.of(request)
    body = parse(CompletionRequest, await service.read_body(request))
    check_completion(body)
    gateway.accept(body, request)
    model = gateway.scheduler.ready_model
    prompts = await gateway.in_thread(request, _encode, model.tokenizer, body.prompts)
    messages = service.submits(body, model, prompts, body.max_tokens, "prompt", request)
    return await service.respond(request, body, model, messages, CompletionFormat(body, model))


def _encode(tokenizer: TextTokenizer, prompts: list[str] | list[list[int]]) -> list[list[int]]:
    encoded = [tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    if not all(encoded):
        raise InvalidRequest("a prompt must have at least one token", "prompt", "invalid_value")
    return encoded


class CompletionFormat:
    """Answers and chunks of legacy completions: the same object name in both."""

    prompt_field = "prompt"

    def __init__(self, body: CompletionRequest, model: Model) -> None:
        self._include_usage = body.include_usage
        self._head = service.head("cmpl", "text_completion", body, model)

    def body(self, answer: Answer, texts: Sequence[str]) -> JSON:
        """The whole answer."""
        choices = [_choice(choice.index, text, choice.finish_reason) for choice, text in zip(answer.choices, texts, strict=True)]
        return {**self._head, "choices": choices, "usage": service.usage(answer)}

    async def chunks(self, deltas: AsyncIterator[Delta | None], answer: Answer) -> AsyncIterator[JSON | None]:
        """Text as it comes; the last of each choice says how it finished."""
        async for delta in deltas:
            if delta is None:
                yield None
                continue
            choice = _choice(delta.index, delta.text, delta.finish_reason)
            yield {**self._head, "choices": [choice], **({"usage": None} if self._include_usage else {})}
        if self._include_usage:
            yield {**self._head, "choices": [], "usage": service.usage(answer)}


def _choice(index: int, text: str, finish_reason: str | None) -> JSON:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
