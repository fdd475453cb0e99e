"""POST /v1/chat/completions."""

import json
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.answer import Answer, Delta
from services.gateway.chat.template import Conversation, Message, encode_chat
from services.gateway.model import Model
from services.gateway.openai import service
from services.gateway.openai.answering import chunk_ending, chunk_opening, head, respond, usage
from services.gateway.openai.schemas import ChatMessage, ChatRequest, ConversationRequest, ToolCall
from services.gateway.openai.service import JSON
from services.gateway.openai.sse import event, to_json
from services.gateway.openai.submission import submits
from services.gateway.openai.validation import check_chat

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation."""
    gateway, body, model = await service.opened(request, ChatRequest, check_chat)
    prompt = await gateway.in_thread(request, encode_chat, gateway.renderer, model.tokenizer, conversation(body))
    max_tokens = body.max_completion_tokens or body.max_tokens
    messages = submits(body, model, [prompt.ids], max_tokens, "messages", request)
    return await respond(request, body, model, messages, ChatFormat(body, model))


def conversation(body: ConversationRequest) -> Conversation:
    """What the model's template is rendered with."""
    return Conversation(
        messages=[template_message(message) for message in body.messages],
        add_generation_prompt=not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        arguments=body.chat_template_kwargs,
    )


def template_message(message: ChatMessage) -> Message:
    """A message as chat templates expect it: content is a string, never None; arguments of tool calls are objects."""
    content = message.content if isinstance(message.content, str) else "".join(part.text for part in message.content or [])
    plain: Message = {"role": message.role, "content": content}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return plain


def _template_call(call: ToolCall) -> JSON:
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError:  # a model may have written anything: then as it wrote it
        arguments = call.function.arguments
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}


class ChatFormat:
    """Answers and chunks of chat completions."""

    prompt_field = "messages"

    def __init__(self, body: ChatRequest, model: Model) -> None:
        self._choices = body.n
        self._include_usage = body.include_usage
        self._head = head("chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion", body, model)
        self._opening = chunk_opening(self._head)
        self._ending = chunk_ending(self._include_usage)
        self._begun = False

    def body(self, answer: Answer, texts: Sequence[str]) -> JSON:
        """The whole answer."""
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
            }
            for choice, text in zip(answer.choices, texts, strict=True)
        ]
        return {**self._head, "choices": choices, "usage": usage(answer)}

    def events(self, delta: Delta) -> str:
        """First the role of each choice, then its text, then how it finished."""
        events = ""
        if not self._begun:
            self._begun = True
            for index in range(self._choices):
                events += self._chunk(index, '{"role":"assistant","content":"","refusal":null}')
        if delta.text:
            events += self._chunk(delta.index, f'{{"content":{to_json(delta.text)}}}')
        if delta.finish_reason:
            events += self._chunk(delta.index, "{}", delta.finish_reason)
        return events

    def closing(self, answer: Answer) -> str:
        """The usage, where it is asked for."""
        return event(to_json({**self._head, "choices": [], "usage": usage(answer)})) if self._include_usage else ""

    def _chunk(self, index: int, delta: str, finish_reason: str | None = None) -> str:
        """delta: JSON."""
        choice = f'{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":{to_json(finish_reason)}}}'
        return event(f"{self._opening}{choice}{self._ending}")
