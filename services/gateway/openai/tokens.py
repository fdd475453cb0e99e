"""What the gateway knows of tokens: /tokenize, /detokenize, /tokenizer_info, and a conversation's prompt as the model gets it."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from services.gateway.chat.template import encode_chat
from services.gateway.openai import service
from services.gateway.openai.chat import conversation
from services.gateway.openai.schemas import TokenizeChatRequest
from services.gateway.openai.service import JSON, Gateway
from services.gateway.openai.submission import check_ids
from services.gateway.openai.validation import chat_request, detokenize_request, tokenize_request

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> JSON:
    """The token ids of a prompt, or of a conversation."""
    gateway, body, model = await service.opened(request, tokenize_request)
    if isinstance(body, TokenizeChatRequest):
        asked = conversation(body, gateway.dialect(model))
        ids = (await gateway.in_thread(request, encode_chat, gateway.renderer, model.tokenizer, asked)).ids
    else:
        ids = await gateway.in_thread(request, model.tokenizer.encode_prompt, body.prompt, body.add_special_tokens)
    strings = [model.tokenizer.token_texts.text(id_) for id_ in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.max_length, "tokens": ids, "token_strs": strings}


@router.post("/detokenize")
async def detokenize(request: Request) -> JSON:
    """The text of token ids, control tokens too."""
    gateway, body, model = await service.opened(request, detokenize_request)
    check_ids("tokens", body.tokens, model)
    return {"prompt": await gateway.in_thread(request, model.tokenizer.decode, body.tokens)}


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
async def render_chat(request: Request) -> JSON:
    """The prompt that a chat completion of this body would have."""
    gateway, body, model = await service.opened(request, chat_request)
    asked = conversation(body, gateway.dialect(model))
    prompt = await gateway.in_thread(request, encode_chat, gateway.renderer, model.tokenizer, asked)
    return {"model": body.model, "prompt": prompt.text, "tokens": prompt.ids, "count": len(prompt.ids)}
