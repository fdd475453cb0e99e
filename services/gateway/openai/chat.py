"""POST /v1/chat/completions."""

from collections.abc import Iterator, Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.answer import Answer
from services.gateway.chat import parts
from services.gateway.chat.output import END_OF_THINKING, Dialect
from services.gateway.chat.renderer import Renderer
from services.gateway.chat.template import Conversation, Message, Prompt, encode_chat
from services.gateway.choice import TURN_TOKENS, Delta, FinishReason, ScoredToken
from services.gateway.model import Model
from services.gateway.openai import service
from services.gateway.openai.answering import Outcome, chunk_ending, head, opening, respond, usage, whole
from services.gateway.openai.logprobs import chat_logprobs
from services.gateway.openai.schemas import ChatMessage, ChatRequest, ConversationRequest
from services.gateway.openai.sending import JSON, to_json
from services.gateway.openai.sse import REASONS, event
from services.gateway.openai.submission import submits
from services.gateway.openai.tools import callable_tools, template_calls, template_id, template_tools
from services.gateway.openai.validation import chat_request
from services.gateway.text.tokenizer import TextTokenizer

router = APIRouter()

PARSED_CHARACTERS = 4096  # at a time: what a parser has left is copied once for each call that it finds


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation."""
    gateway, body, model = await service.opened(request, chat_request)
    dialect = gateway.dialect(model)
    prompt = await gateway.in_thread(request, prompt_of, gateway.renderer, model.tokenizer, body, dialect)
    max_tokens = body.max_completion_tokens or body.max_tokens
    messages = await submits(body, model, [prompt.ids], max_tokens, "messages", request)
    return await respond(request, body, model, messages, ChatFormat(body, model, dialect, prompt.text))


def prompt_of(renderer: Renderer, tokenizer: TextTokenizer, body: ConversationRequest, dialect: Dialect) -> Prompt:
    """The prompt of a conversation. Takes a thread's time. Raises InvalidRequest."""
    return encode_chat(renderer, tokenizer, conversation(body, dialect))


def conversation(body: ConversationRequest, dialect: Dialect) -> Conversation:
    """What the model's template is rendered with. Raises InvalidRequest when it knows no tools, and there are some."""
    return Conversation(
        messages=[template_message(message, dialect) for message in body.messages],
        tools=template_tools(body, dialect),
        add_generation_prompt=not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        arguments={**_effort(body.reasoning_effort), **body.chat_template_kwargs},
    )


def _effort(asked: str | None) -> dict[str, str | bool]:
    """OpenAI's name for how much to think, as the variables that chat templates have for it."""
    return {"reasoning_effort": asked, "enable_thinking": asked != "none"} if asked else {}


def template_message(message: ChatMessage, dialect: Dialect) -> Message:
    """A message as chat templates expect it: content is a string, never None; arguments of tool calls are objects."""
    plain: Message = {"role": message.role, "content": message.text}
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_call_id is not None:
        plain["tool_call_id"] = template_id(message.tool_call_id, dialect)
    if message.tool_calls:
        plain["tool_calls"] = template_calls(message, dialect)
    return plain


class ChatFormat:
    """Answers and chunks of chat completions."""

    prompt_field = "messages"

    def __init__(self, body: ChatRequest, model: Model, dialect: Dialect, prompt: str) -> None:
        tools = callable_tools(body)
        self.shown = dialect.shown(tools=bool(tools))
        continued = template_message(body.messages[-1], dialect)["content"] if body.continue_final_message else ""
        self._parsers = [
            dialect.parser(prompt=prompt, continued=continued, tools=tools, parallel=body.parallel_tool_calls) for _ in range(body.n)
        ]
        self._end_of_thinking = model.tokenizer.transformers.backend_tokenizer.token_to_id(END_OF_THINKING)
        self._choices = body.n
        self._has_logprobs, self._texts = body.logprobs, model.tokenizer.token_texts
        self._untold: list[list[ScoredToken]] = [[] for _ in range(body.n)]  # tokens whose log-probabilities wait for a chunk
        self._include_usage = body.include_usage
        self._head = head("chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion", body, model)
        self._opening = opening(self._head)
        self._ending = chunk_ending(self._include_usage)
        self._begun = False

    def body(self, outcomes: Sequence[Outcome], answer: Answer) -> Iterator[str]:
        """JSON of the whole answer, in pieces."""
        return whole(self._opening, self._whole_choices(outcomes), lambda: self._usage(answer))

    def _whole_choices(self, outcomes: Sequence[Outcome]) -> Iterator[str]:
        for outcome in outcomes:
            text, push = outcome.text, self._parsers[outcome.index].push
            parsed = [part for start in range(0, len(text), PARSED_CHARACTERS) for part in push(text[start : start + PARSED_CHARACTERS])]
            found, finish_reason = self._parts(outcome.index, parsed, outcome.finish_reason)
            yield f'{"," if outcome.index else ""}{{"index":{outcome.index},"message":{to_json(parts.message(found))},"logprobs":'
            yield from self._logprobs(outcome.tokens)
            yield f',"finish_reason":{REASONS[finish_reason]}}}'

    def events(self, delta: Delta) -> str:
        """First the role of each choice, then its text, then how it finished."""
        events = ""
        if not self._begun:
            self._begun = True
            for index in range(self._choices):
                events += self._chunk(index, '{"role":"assistant","content":"","refusal":null}')
        found, finish_reason = self._parts(delta.index, self._parsers[delta.index].push(delta.text), delta.finish_reason)
        self._untold[delta.index] += delta.tokens
        for part in found:
            # Nearly always content: written by hand, since chunks are many.
            told = f'{{"content":{to_json(part.text)}}}' if isinstance(part, parts.Content) else to_json(part.delta())
            events += self._chunk(delta.index, told, self._told_tokens(delta.index))
        if len(self._untold[delta.index]) >= TURN_TOKENS:  # while text is held back: all at once would hold up others
            events += self._chunk(delta.index, "{}", self._told_tokens(delta.index))
        if finish_reason:
            events += self._chunk(delta.index, "{}", self._told_tokens(delta.index), finish_reason)
        return events

    def closing(self, answer: Answer) -> str:
        """The usage, where it is asked for."""
        return event(to_json({**self._head, "choices": [], "usage": self._usage(answer)})) if self._include_usage else ""

    def _usage(self, answer: Answer) -> JSON:
        """With the tokens up to the one that ends the reasoning, where the model has such a token."""
        reasoning = 0
        for choice, parser in zip(answer.choices, self._parsers, strict=True):
            if parser.has_thought and self._end_of_thinking is not None:
                ids = choice.generation.ids[: choice.completion_tokens]
                reasoning += ids.index(self._end_of_thinking) + 1 if self._end_of_thinking in ids else len(ids)
        return usage(answer, reasoning)

    def _parts(self, index: int, found: list[parts.Part], finish_reason: FinishReason | None) -> tuple[list[parts.Part], str | None]:
        """What is new of a choice, of which `found` has been parsed; at its end with the reason."""
        if finish_reason is None:
            return found, None
        last, reason = self._parsers[index].finish(finish_reason)
        return [*found, *last], reason

    def _told_tokens(self, index: int) -> str:
        """JSON of the log-probabilities that go with the next chunk of a choice."""
        tokens, self._untold[index] = self._untold[index], []
        return "".join(self._logprobs(tokens)) if tokens else "null"

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> Iterator[str]:
        return chat_logprobs(tokens, self._texts) if self._has_logprobs else iter(("null",))

    def _chunk(self, index: int, delta: str, logprobs: str = "null", finish_reason: str | None = None) -> str:
        """delta, logprobs: JSON."""
        choice = f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{REASONS[finish_reason]}}}'
        return event(f"{self._opening}{choice}{self._ending}")
