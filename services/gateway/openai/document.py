"""The OpenAPI document: written here, since bodies are read by hand for OpenAI's errors, and compared with the routes by tests."""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.openai import answers, schemas

JSON = dict[str, Any]
REFERENCE = "#/components/schemas/{model}"

STATUSES = {
    400: "The request is wrong, or asks for more than the model's context holds.",
    401: "An API key is needed, or this one is none.",
    404: "No model is served under this name.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "Too much to do, or the limit of the API key is reached: come back after Retry-After.",
    500: "The fault is ours.",
    503: "Nothing to serve the request just now: come back after Retry-After.",
    504: "The request took too long.",
}
NAMED = (401, 404, 429, 500)  # of routes that name a model in their path
PLAIN = (401, 429, 500)


@dataclass(frozen=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    summary: str
    answer: type[BaseModel]
    bodies: tuple[type[BaseModel], ...] = ()  # one of these
    event: type[BaseModel] | None = None  # of the stream that it answers with when `stream` is true
    errors: tuple[int, ...] = tuple(STATUSES)


OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answers a conversation.",
        answers.ChatCompletion,
        (schemas.ChatRequest,),
        answers.ChatCompletionChunk,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continues one or several prompts.",
        answers.Completion,
        (schemas.CompletionRequest,),
        answers.CompletionChunk,
    ),
    Operation("post", "/v1/chat/completions/render", "The prompt of a conversation.", answers.RenderedChat, (schemas.ChatRequest,)),
    Operation(
        "post",
        "/tokenize",
        "Token ids of a prompt or of a conversation.",
        answers.Tokenized,
        (schemas.TokenizeRequest, schemas.TokenizeChatRequest),
    ),
    Operation("post", "/detokenize", "The text of token ids.", answers.Detokenized, (schemas.DetokenizeRequest,)),
    Operation("get", "/tokenizer_info", "What the model's tokenizer adds.", answers.TokenizerInfo, errors=(*PLAIN, 503)),
    Operation("get", "/v1/models", "All served names.", answers.ModelList, errors=PLAIN),
    Operation("get", "/v1/models/{name}", "One served name, which may hold slashes.", answers.ModelCard, errors=NAMED),
    Operation("get", "/status", "How the deployment stands.", answers.Status, errors=(*PLAIN, 503)),
    Operation("get", "/health", "200 while requests can be served.", answers.Health, errors=(429, 500, 503)),
    Operation("get", "/version", "Of Lockstep.", answers.Version, errors=PLAIN),
)


def document(names: Sequence[str]) -> JSON:
    """For a gateway that serves a model under these names."""
    bodies = {body for operation in OPERATIONS for body in operation.bodies}
    given = {model for operation in OPERATIONS for model in (operation.answer, operation.event) if model} | {answers.ErrorAnswer}
    models = sorted(bodies | given, key=lambda model: model.__name__)
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REFERENCE)
    components = definitions["$defs"]
    for body in bodies:
        components[body.__name__]["properties"]["model"] = _served(
            names, optional="model" not in components[body.__name__].get("required", ())
        )
    paths: JSON = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Lockstep", "version": importlib.metadata.version("lockstep"), "description": DESCRIPTION},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


DESCRIPTION = (
    "OpenAI's chat and legacy completions, with extensions. Null means the same as leaving a field out. Unknown fields are ignored, but "
    "for those of other servers that would change the answer: they are refused. "
    "Every error has the shape of ErrorAnswer. Every answer has an x-request-id."
)


def _served(names: Sequence[str], optional: bool) -> JSON:
    return {"enum": [*names, None] if optional else list(names), "description": "A served name."}


def _operation(operation: Operation) -> JSON:
    content: JSON = {"application/json": {"schema": _reference(operation.answer)}}
    if operation.event is not None:
        name = operation.event.__name__
        told = f"With `stream`: events of one line, `data: ` and a {name}. The last is `data: [DONE]` or, after a fault, an ErrorAnswer. "
        told += "Lines that begin with a colon keep the connection alive."
        # Without a type: some read a stream's schema as that of an event, others as that of the whole body.
        content["text/event-stream"] = {"schema": {"description": told}, "x-event": _reference(operation.event)}
    described: JSON = {
        "summary": operation.summary,
        "operationId": operation.method + operation.path.title().translate(str.maketrans("", "", "/_{}")),
        "responses": {"200": {"description": operation.answer.__doc__ or operation.summary, "content": content}},
    }
    for status in operation.errors:
        error: JSON = {"description": STATUSES[status], "content": {"application/json": {"schema": _reference(answers.ErrorAnswer)}}}
        if status in (429, 503):
            error["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}, "description": "Seconds."}}
        described["responses"][str(status)] = error
    if operation.bodies:
        references = [_reference(body) for body in operation.bodies]
        schema = references[0] if len(references) == 1 else {"anyOf": references}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{name}" in operation.path:
        described["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}]
    return described


def _reference(model: type[BaseModel]) -> JSON:
    return {"$ref": REFERENCE.format(model=model.__name__)}
