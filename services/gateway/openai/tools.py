"""Tools in a request: what it may ask for, and what the chat template gets. `chat/tools.py` reads what the model makes of them."""

import hashlib
import json
from typing import Any

from pydantic_core import from_json

from services.gateway.chat.output import Dialect
from services.gateway.chat.tagged_calls import Schemas
from services.gateway.errors import InvalidRequest
from services.gateway.openai.schemas import ChatMessage, ConversationRequest, ToolCall

MISTRAL_ID_LENGTH = 9  # Mistral's templates refuse any other


def check_tools(body: ConversationRequest) -> None:
    """Raises InvalidRequest unless the model may freely choose among the tools: forcing it takes constrained decoding."""
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return
    if not body.tools:
        raise InvalidRequest("tool_choice needs tools", "tool_choice")
    if not isinstance(choice, str) and choice is not None and choice.function is not None:
        names = [tool.function.name for tool in body.tools]
        if choice.function.name not in names:
            raise InvalidRequest(f"tool_choice names '{choice.function.name[:100]}', which is not in tools", "tool_choice")
    raise InvalidRequest("this tool_choice is not supported: set 'auto' or 'none'", "tool_choice", "unsupported_value")


def check_results(body: ConversationRequest) -> None:
    """Raises InvalidRequest unless the results of all calls follow them, as far as the conversation goes on."""
    missing: set[str] = set()
    for index, message in enumerate(body.messages):
        if message.role == "tool":
            missing.discard(message.tool_call_id or "")
        elif missing:
            raise InvalidRequest(f"no message has the result of the call '{min(missing)[:100]}'", f"messages[{index}]")
        missing |= {call.id for call in message.tool_calls or []} if message.role == "assistant" else set()


def callable_tools(body: ConversationRequest) -> Schemas:
    """Those that the answer may call."""
    return {} if body.tool_choice == "none" else {tool.function.name: tool.function.parameters or {} for tool in body.tools or []}


def template_tools(body: ConversationRequest, dialect: Dialect) -> list[dict[str, Any]] | None:
    """The tools that the model is shown. Raises InvalidRequest when its template knows none."""
    if not callable_tools(body):
        return None
    if dialect.tools is None:
        raise InvalidRequest("this model's chat template knows no tools: leave them out, or set tool_choice to 'none'", "tools")
    return [tool.model_dump(exclude_none=True) for tool in body.tools or []]


def template_calls(message: ChatMessage, dialect: Dialect) -> list[dict[str, Any]]:
    """The calls in a message of the assistant, their arguments as objects, unless the template puts texts together."""
    return [_template_call(call, dialect) for call in message.tool_calls or []]


def template_id(id_: str, dialect: Dialect) -> str:
    """The id of a call as the model's template takes it: equal for equal ids."""
    if dialect.tools != "mistral" or (len(id_) == MISTRAL_ID_LENGTH and id_.isalnum() and id_.isascii()):
        return id_
    return hashlib.sha256(id_.encode()).hexdigest()[:MISTRAL_ID_LENGTH]


def _template_call(call: ToolCall, dialect: Dialect) -> dict[str, Any]:
    written = call.function.arguments
    try:
        arguments = from_json(written, allow_inf_nan=False) if written.strip() else {}  # bounds their depth, and takes no half characters
        json.dumps(arguments, allow_nan=False)  # refuses what is infinite: 1e400
    except ValueError:  # a model may have written anything: then as it wrote it
        arguments = written
    if dialect.takes_text:
        arguments = written if written.strip() else "{}"
    elif dialect.takes_objects and not isinstance(arguments, dict):
        arguments = {"arguments": written}  # a conversation must be able to go on
    return {"id": template_id(call.id, dialect), "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
