"""What the gateway knows of tokens: /tokenize, /detokenize, /tokenizer_info, and a conversation's prompt as the model gets it."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.chat.template import Prompt
from services.gateway.model import Model
from services.gateway.openai import service
from services.gateway.openai.chat import prompt_of
from services.gateway.openai.schemas import TokenizeChatRequest
from services.gateway.openai.sending import JSON, json_response, listed, to_json
from services.gateway.openai.service import Gateway
from services.gateway.openai.submission import check_ids
from services.gateway.openai.validation import chat_request, detokenize_request, tokenize_request

router = APIRouter()

AT_A_TIME = 4096  # ids or characters of a large answer that are written before others get their turn


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """The token ids of a prompt, or of a conversation."""
    gateway, body, model = await service.opened(request, tokenize_request)
    if isinstance(body, TokenizeChatRequest):
        ids = (await gateway.in_thread(request, prompt_of, gateway.renderer, model.tokenizer, body, gateway.dialect(model))).ids
    else:
        ids = await gateway.in_thread(request, model.tokenizer.encode_prompt, body.prompt, body.add_special_tokens)
    return json_response(_tokenized(ids, model, body.return_token_strs), request)


def _tokenized(ids: Sequence[int], model: Model, has_strings: bool) -> Iterator[str]:
    texts = model.tokenizer.token_texts
    yield f'{{"count":{len(ids)},"max_model_len":{model.max_length},"tokens":'
    yield from listed(map(str, ids), AT_A_TIME)
    yield ',"token_strs":'
    yield from listed((texts[id_].text_json for id_ in ids), AT_A_TIME) if has_strings else ("null",)
    yield "}"


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids, control tokens too."""
    gateway, body, model = await service.opened(request, detokenize_request)
    check_ids("tokens", body.tokens, model.vocab_size)
    text = await gateway.in_thread(request, model.tokenizer.decode, body.tokens)
    return json_response(itertools.chain("{", _prompt(text), "}"), request)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> JSON:
    """What clients need to know to tokenise by themselves."""
    model = Gateway.of(request).scheduler.ready_model
    special: dict[str, Any] = model.tokenizer.transformers.special_tokens_map
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return {
        **{name: special.get(name) for name in names},
        "chat_template": model.tokenizer.chat_template,
        "vocab_size": model.vocab_size,
        "eos_token_ids": sorted(model.eos_ids),
        "max_model_len": model.max_length,
    }


@router.post("/v1/chat/completions/render")
async def render_chat(request: Request) -> Response:
    """The prompt that a chat completion of this body would have."""
    gateway, body, model = await service.opened(request, chat_request)
    prompt = await gateway.in_thread(request, prompt_of, gateway.renderer, model.tokenizer, body, gateway.dialect(model))
    return json_response(_rendered(body.model, prompt), request)


def _rendered(name: str, prompt: Prompt) -> Iterator[str]:
    yield f'{{"model":{to_json(name)},'
    yield from _prompt(prompt.text)
    yield f',"count":{len(prompt.ids)},"tokens":'
    yield from listed(map(str, prompt.ids), AT_A_TIME)
    yield "}"


def _prompt(text: str) -> Iterator[str]:
    yield '"prompt":"'
    for start in range(0, len(text), AT_A_TIME):
        yield to_json(text[start : start + AT_A_TIME])[1:-1]
    yield '"'
