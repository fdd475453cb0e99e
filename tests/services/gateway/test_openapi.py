"""The OpenAPI document is true: of routes, of what is taken, of what comes back."""

import json
from typing import Any

import pytest
from fastapi.routing import APIRoute

from services.gateway.openai import chat, completions, models, tokens
from services.gateway.openai.answers import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk, ErrorAnswer
from services.gateway.openai.document import OPERATIONS, document
from tests.services.gateway.conftest import EOS, Stack, events

ASKED: list[dict[str, Any]] = [
    {},
    {"n": 2, "stop": "wor"},
    {"max_tokens": 2},
    {"stream_options": {"include_usage": True}},
]


def test_every_route_is_described() -> None:
    ours = [route for module in (chat, completions, models, tokens) for route in module.router.routes]
    routes = {(method.lower(), route.path_format) for route in ours if isinstance(route, APIRoute) for method in route.methods or ()}
    others = {("get", path) for path in ("/status", "/health", "/version")}
    assert {(operation.method, operation.path) for operation in OPERATIONS} == routes | others


async def test_the_document_is_served(stack: Stack) -> None:
    served = (await stack.http.get("/openapi.json")).json()
    assert served == json.loads(json.dumps(document(["tiny", "org/tiny"])))
    assert served["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"] == ["tiny", "org/tiny"]
    for operation in OPERATIONS:
        if operation.path in ("/v1/models", "/status", "/health", "/version", "/tokenizer_info"):
            assert operation.answer.model_validate((await stack.http.get(operation.path)).json())


@pytest.mark.parametrize("fields", ASKED)
async def test_answers_are_as_described(stack: Stack, fields: dict[str, Any]) -> None:
    stack.says("hello, world é", tokens_a_step=2)
    whole = {name: value for name, value in fields.items() if name != "stream_options"}
    ChatCompletion.model_validate((await stack.chat(**whole, logprobs=True, top_logprobs=2)).json(), strict=True)
    Completion.model_validate((await stack.complete(**whole, logprobs=2, echo=True)).json(), strict=True)
    for chunk in await stack.chat_events(**fields, logprobs=True, top_logprobs=2):
        ChatCompletionChunk.model_validate(chunk, strict=True)
    for chunk in events((await stack.complete(stream=True, logprobs=1, **fields)).content):
        CompletionChunk.model_validate(chunk, strict=True)
    ErrorAnswer.model_validate((await stack.chat(n=0)).json(), strict=True)


async def test_a_special_token_has_no_bytes(stack: Stack) -> None:
    stack.plays(stack.encode("a"), [1], [EOS])
    ChatCompletion.model_validate((await stack.chat(logprobs=True)).json(), strict=True)
