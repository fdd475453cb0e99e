"""POST /v1/completions, the legacy endpoint."""

from collections.abc import Iterator, Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.answer import Answer
from services.gateway.choice import Delta, Echo
from services.gateway.errors import InvalidRequest
from services.gateway.model import Model
from services.gateway.openai import service
from services.gateway.openai.answering import Outcome, chunk_ending, head, opening, respond, usage, whole
from services.gateway.openai.logprobs import LegacyLogprobs
from services.gateway.openai.schemas import CompletionRequest
from services.gateway.openai.sending import to_json
from services.gateway.openai.sse import REASONS, event
from services.gateway.openai.submission import submits
from services.gateway.openai.validation import completion_request
from services.gateway.text.tokenizer import TextTokenizer

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continues one or several prompts."""
    gateway, body, model = await service.opened(request, completion_request)
    prompts = await gateway.in_thread(request, _encode, model.tokenizer, body.prompts)
    messages = await submits(body, model, prompts, body.length, "prompt", request)
    echoes = await gateway.in_thread(request, _echoes, model.tokenizer, body.prompts, prompts) if body.echo else []
    return await respond(request, body, model, messages, CompletionFormat(body, model), echoes)


def _echoes(tokenizer: TextTokenizer, prompts: list[str] | list[list[int]], encoded: list[list[int]]) -> list[Echo]:
    echoes = []
    for prompt, ids in zip(prompts, encoded, strict=True):
        pieces = tokenizer.prompt_pieces(ids, is_text=isinstance(prompt, str))
        echoes.append(Echo(prompt if isinstance(prompt, str) else "".join(pieces), ids, pieces))
    return echoes


def _encode(tokenizer: TextTokenizer, prompts: list[str] | list[list[int]]) -> list[list[int]]:
    encoded = [tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    if not all(encoded):
        raise InvalidRequest("a prompt must have at least one token", "prompt", "invalid_value")
    return encoded


class CompletionFormat:
    """Answers and chunks of legacy completions: the same object name in both."""

    prompt_field = "prompt"
    shown: frozenset[str] = frozenset()

    def __init__(self, body: CompletionRequest, model: Model) -> None:
        self._include_usage = body.include_usage
        choices = len(body.prompts) * body.candidates
        texts = model.tokenizer.token_texts
        self._logprobs = None if body.logprobs is None else [LegacyLogprobs(texts) for _ in range(choices)]
        self._head = head("cmpl", "text_completion", body, model)
        self._opening = opening(self._head)
        self._ending = chunk_ending(self._include_usage)

    def body(self, outcomes: Sequence[Outcome], answer: Answer) -> Iterator[str]:
        """JSON of the whole answer, in pieces."""
        return whole(self._opening, self._whole_choices(outcomes), lambda: usage(answer))

    def _whole_choices(self, outcomes: Sequence[Outcome]) -> Iterator[str]:
        for outcome in outcomes:
            yield f'{"," if outcome.index else ""}{{"index":{outcome.index},"text":{to_json(outcome.text)},"logprobs":'
            yield from ("null",) if self._logprobs is None else self._logprobs[outcome.index].of(outcome.tokens)
            yield f',"finish_reason":{REASONS[outcome.finish_reason]}}}'

    def events(self, delta: Delta) -> str:
        """Text as it comes; the last of each choice says how it finished."""
        logprobs = "null" if self._logprobs is None else "".join(self._logprobs[delta.index].of(delta.tokens))
        choice = (
            f'{{"index":{delta.index},"text":{to_json(delta.text)},"logprobs":{logprobs},"finish_reason":{REASONS[delta.finish_reason]}}}'
        )
        return event(f"{self._opening}{choice}{self._ending}")

    def closing(self, answer: Answer) -> str:
        """The usage, where it is asked for."""
        return event(to_json({**self._head, "choices": [], "usage": usage(answer)})) if self._include_usage else ""
