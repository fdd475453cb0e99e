"""From a body's bytes to a checked request, every fault told as OpenAI does: status 400, the field as `param`, a code."""

import codecs
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from services.gateway.errors import InvalidRequest
from services.gateway.openai.foreign import refuse_foreign
from services.gateway.openai.schemas import (
    MAX_CHOICES,
    Body,
    ChatRequest,
    CompletionRequest,
    ConversationRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from services.gateway.openai.tools import check_results, check_tools

B = TypeVar("B", bound=Body)

# Parsing JSON holds up every other request, for 50 ms with as many lists and objects, or as many elements, as these.
MAX_CONTAINERS = 100_000
MAX_ELEMENTS = 1_000_000
MAX_QUOTED = 100  # characters of the client's input that a message repeats
WHOLE_FIELDS = (
    "prompt",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "metadata",
    "chat_template_kwargs",
    "tokens",
)  # a fault inside is told of the field

TWO_LENGTHS = "max_tokens and max_completion_tokens differ: set one"

CODES = {  # of pydantic's error types
    "missing": "missing_required_parameter",
    "literal_error": "invalid_value",
    "greater_than": "below_min_value",
    "greater_than_equal": "below_min_value",
    "less_than": "above_max_value",
    "less_than_equal": "above_max_value",
    "string_too_long": "string_above_max_length",
    "string_too_short": "string_below_min_length",
    "string_pattern_mismatch": "invalid_value",
}
WORDS = dict.fromkeys(("model_type", "dict_type"), "Input should be an object")  # instead of pydantic's, which speak of Python
LENGTH_CODES = {  # by pydantic's error type and kind of container
    ("too_long", "List"): "array_above_max_length",
    ("too_long", "Dictionary"): "object_above_max_properties",
    ("too_short", "List"): "empty_array",
}


def parse_json(data: bytes) -> dict[str, Any]:
    """The JSON object in a body. Raises InvalidRequest; also for lone surrogates, NaN and Infinity, which are no JSON."""
    _check_structure(data)
    try:
        value = from_json(data.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)  # editors and shells of Windows write that mark
    except ValueError as error:
        raise InvalidRequest(f"could not parse the body of your request as JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body of your request must be a JSON object")
    return value


def _check_structure(data: bytes) -> None:
    """Raises InvalidRequest for a body that would take long to parse. Signs within strings count too: telling them apart is parsing."""
    containers, elements = data.count(b"[") + data.count(b"{"), data.count(b",")
    if containers > MAX_CONTAINERS:
        raise InvalidRequest(f"the body has {containers} opening brackets and braces, at most {MAX_CONTAINERS} are read")
    if elements > MAX_ELEMENTS:
        raise InvalidRequest(f"the body has {elements} commas, at most {MAX_ELEMENTS} are read")


def parse(schema: type[B], data: bytes) -> B:
    """The request in a body. Raises InvalidRequest naming the first fault."""
    return checked(schema, parse_json(data))


def checked(schema: type[B], value: dict[str, Any]) -> B:
    """The same of a body that is parsed already."""
    if schema.prompt_field:
        refuse_foreign(value, schema.prompt_field)
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise _told(next((fault for fault in faults if fault["type"] == "missing" and len(fault["loc"]) == 1), faults[0])) from error


def chat_request(data: bytes) -> ChatRequest:
    """A body of POST /v1/chat/completions. Raises InvalidRequest, also for what breaks rules of several fields."""
    body = parse(ChatRequest, data)
    _check_conversation(body)
    check_results(body)
    _check_common(body)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest(TWO_LENGTHS, "max_tokens", "invalid_parameter_combination")
    return body


def completion_request(data: bytes) -> CompletionRequest:
    """A body of POST /v1/completions. Raises InvalidRequest, also for what breaks rules of several fields."""
    body = parse(CompletionRequest, data)
    _check_common(body)
    if body.max_completion_tokens not in (None, body.max_tokens) and "max_tokens" in body.model_fields_set:
        raise InvalidRequest(TWO_LENGTHS, "max_tokens", "invalid_parameter_combination")
    if body.best_of is not None and body.best_of < body.n:
        raise InvalidRequest("best_of must be at least n", "best_of")
    if body.candidates > body.n and body.stream:
        raise InvalidRequest("best_of larger than n cannot be streamed", "best_of")
    if len(body.prompts) * body.candidates > MAX_CHOICES:
        message = f"{len(body.prompts)} prompts and {body.candidates} choices each: at most {MAX_CHOICES} in all"
        raise InvalidRequest(message, "n", "integer_above_max_value")
    return body


def tokenize_request(data: bytes) -> TokenizeRequest | TokenizeChatRequest:
    """A body of POST /tokenize: of a prompt or of messages. Raises InvalidRequest."""
    value = parse_json(data)  # once: it holds up others
    if value.get("messages") is None:
        return checked(TokenizeRequest, value)
    body = checked(TokenizeChatRequest, value)
    _check_conversation(body)
    return body


def detokenize_request(data: bytes) -> DetokenizeRequest:
    """A body of POST /detokenize. Raises InvalidRequest."""
    return parse(DetokenizeRequest, data)


def _check_conversation(body: ConversationRequest) -> None:
    check_tools(body)
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    for index, message in enumerate(body.messages):
        if message.content == [] and not (message.role == "assistant" and message.tool_calls):
            raise InvalidRequest("content must not be an empty list", f"messages[{index}].content", "empty_array")
        if message.function_call is not None:
            raise InvalidRequest("function_call is not supported: use tool_calls", f"messages[{index}].function_call", "unsupported_value")
        if message.role == "tool" and message.tool_call_id is None:
            param = f"messages[{index}].tool_call_id"
            raise InvalidRequest(f"missing required parameter: '{param}'", param, "missing_required_parameter")


def _check_common(body: GenerationRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", "stream_options")
    if body.response_format and body.response_format.type == "json_schema" and body.response_format.json_schema is None:
        param = "response_format.json_schema"
        raise InvalidRequest(f"missing required parameter: '{param}'", param, "missing_required_parameter")
    if body.response_format and body.response_format.type != "text":
        raise InvalidRequest("response_format other than text is not supported", "response_format", "unsupported_value")


def _told(fault: ErrorDetails) -> InvalidRequest:
    location = [part for part in fault["loc"] if not str(part).startswith("<")]
    if location[0] == "model":
        return InvalidRequest("you must provide a model parameter")
    param = str(location[0]) if location[0] in WHOLE_FIELDS else _path(location)
    if fault["type"] == "missing":
        return InvalidRequest(f"missing required parameter: '{param}'", param, CODES["missing"])
    words = WORDS.get(fault["type"], fault["msg"])[:MAX_QUOTED]
    return InvalidRequest(f"invalid '{param}': {words}, got {_quoted(fault['input'])}", param, _code(fault))


def _code(fault: ErrorDetails) -> str:
    kind, context = fault["type"], fault.get("ctx", {})
    if fault["loc"][-1] == "[key]" and kind == "string_too_long":
        return "property_name_above_max_length"
    if (kind, context.get("field_type")) in LENGTH_CODES:
        return LENGTH_CODES[kind, context["field_type"]]
    code = CODES.get(kind, "invalid_type")
    if code in ("below_min_value", "above_max_value"):
        bound = next(context[name] for name in ("ge", "gt", "le", "lt") if name in context)
        return f"{'decimal' if isinstance(bound, float) else 'integer'}_{code}"
    return code


def _path(location: list[int | str]) -> str:
    """`messages[0].content`, as OpenAI writes it."""
    path = str(location[0])
    for part in location[1:]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path[:MAX_QUOTED]


def _quoted(value: object) -> str:
    """A short form of what the client sent: of lists and objects only their kind."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = repr(value[: MAX_QUOTED + 1] if isinstance(value, str) else value)
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."
