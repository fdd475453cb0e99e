"""POST /v1/chat/completions."""

import json
from collections.abc import AsyncIterator, Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.answer import Answer, Delta
from services.gateway.chat.template import Message, encode_chat
from services.gateway.model import Model
from services.gateway.openai import service
from services.gateway.openai.schemas import ChatMessage, ChatRequest, ToolCall
from services.gateway.openai.service import JSON, Gateway
from services.gateway.openai.validation import check_chat, parse

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation."""
    gateway = Gateway.of(request)
    body = parse(ChatRequest, await service.read_body(request))
    check_chat(body)
    gateway.accept(body, request)
    model = gateway.scheduler.ready_model
    ids = await gateway.in_thread(request, encode_chat, model.tokenizer, [template_message(message) for message in body.messages])
    max_tokens = body.max_completion_tokens or body.max_tokens
    messages = service.submits(body, model, [ids], max_tokens, "messages", request)
    return await service.respond(request, body, model, messages, ChatFormat(body, model))


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
        self._include_usage = body.include_usage
        self._head = service.head("chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion", body, model)

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
        return {**self._head, "choices": choices, "usage": service.usage(answer)}

    async def chunks(self, deltas: AsyncIterator[Delta | None], answer: Answer) -> AsyncIterator[JSON | None]:
        """First the role of each choice, then its text, then how it finished."""
        begun = False
        async for delta in deltas:
            if delta is None:
                yield None
                continue
            if not begun:
                begun = True
                for choice in answer.choices:
                    yield self._chunk(choice.index, {"role": "assistant", "content": "", "refusal": None})
            if delta.text:
                yield self._chunk(delta.index, {"content": delta.text})
            if delta.finish_reason:
                yield self._chunk(delta.index, {}, delta.finish_reason)
        if self._include_usage:
            yield {**self._head, "choices": [], "usage": service.usage(answer)}

    def _chunk(self, index: int, delta: JSON, finish_reason: str | None = None) -> JSON:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice], **({"usage": None} if self._include_usage else {})}
