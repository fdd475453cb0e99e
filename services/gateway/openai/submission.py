"""A checked request becomes messages to the scheduler: one for each choice of each prompt."""

import asyncio
import hashlib
import secrets
from collections.abc import Sequence

import numpy as np
from starlette.requests import Request

from services.gateway.errors import InvalidRequest
from services.gateway.model import Model
from services.gateway.openai.schemas import GenerationRequest
from shared.protocol.generation_pb2 import Sampling, Submit
from shared.protocol.plan import MAX_STOP_IDS, ids_to_bytes

MAX_ID_DIGITS = 10
MAX_QUOTED = 50  # characters of the client's input that a message repeats: a number may have thousands of digits
MAX_PROMPT_TOKENS = 4 << 20  # of all choices of a request, 4 bytes each: every choice has a copy of its prompt
TURN_TOKENS = 1 << 16  # of prompts, that are looked at before others get their turn: 3 ms
MAX_LOGPROBS = 2_000_000  # values of one answer: each takes some hundred bytes in memory, and up to 60 of JSON


async def submits(
    body: GenerationRequest, model: Model, prompts: Sequence[list[int]], max_tokens: int | None, param: str, request: Request
) -> list[Submit]:
    """The messages, prompt by prompt. `max_tokens` None: to the end of the context.

    Raises InvalidRequest, of `param` where a prompt does not fit.
    """
    if (tokens := sum(map(len, prompts)) * body.candidates) > MAX_PROMPT_TOKENS:
        message = f"the choices have {tokens} tokens of prompt together, at most {MAX_PROMPT_TOKENS} are taken: lower n"
        raise InvalidRequest(message, "n", "integer_above_max_value")
    check_ids("stop_token_ids", body.stop_token_ids, model.vocab_size)
    stops = stop_ids(body, model)
    if len(stops) > MAX_STOP_IDS:
        message = f"stop and stop_token_ids name {len(stops)} tokens, at most {MAX_STOP_IDS} are taken"
        raise InvalidRequest(message, "stop", "array_above_max_length")
    seed = secrets.randbits(63) if body.seed is None else body.seed
    sampling = _sampling(body, model)
    samplings = [_seeded(sampling, choice_seed(seed, index)) for index in range(body.candidates)]
    messages: list[Submit] = []
    looked_at = 0
    for prompt in prompts:
        check_ids(param, prompt, min(model.vocab_size, model.tokenizer.known_ids))
        wanted = _completion_tokens(body, model, prompt, max_tokens, param)
        _check_logprobs(body, len(prompts) * body.candidates, len(prompt), wanted)
        prompt_ids = ids_to_bytes(prompt)  # once: there may be 128 choices of a million bytes
        messages += [
            Submit(
                request_id=request.state.request_id,
                prompt_ids=prompt_ids,
                sampling=sampling,
                max_tokens=wanted,
                min_tokens=body.min_tokens,
                ignore_eos=body.ignore_eos,
                stop_token_ids=ids_to_bytes(stops),
                deadline_ms=max(int((request.state.deadline - asyncio.get_running_loop().time()) * 1000), 1),
                tenant=request.state.tenant or None,
                traceparent=request.state.traceparent or None,
                cache_salt=_cache_salt(request.state.tenant, body.cache_salt),
                logprobs=body.completion_scores,
                prompt_logprobs=None if index else body.prompt_scores,  # computed once, for all choices
            )
            for index, sampling in enumerate(samplings)
        ]
        looked_at += len(prompt)
        if looked_at >= TURN_TOKENS:
            looked_at = 0
            await asyncio.sleep(0)
    return messages


def stop_ids(body: GenerationRequest, model: Model) -> list[int]:
    """Those asked for, and the special tokens among the stop strings: nothing shows their text, where a string would be looked for."""
    special = [id_ for stop in body.stops if (id_ := model.tokenizer.special_ids.get(stop, model.vocab_size)) < model.vocab_size]
    return list(dict.fromkeys((*body.stop_token_ids, *special)))


def choice_seed(seed: int, index: int) -> int:
    """The seed of a choice of a request with this seed, int64. The first has the request's own, as if it were alone."""
    if not index:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _cache_salt(tenant: str, salt: str | None) -> str | None:
    """What prefixes must have in common to be shared: of tenants, which share none, only the rest is for the client to choose."""
    return f"{tenant}/{salt or ''}" if tenant else salt


def _seeded(sampling: Sampling, seed: int) -> Sampling:
    seeded = Sampling(seed=seed)
    seeded.MergeFrom(sampling)
    return seeded


def _sampling(body: GenerationRequest, model: Model) -> Sampling:
    """All but the seed."""
    defaults = {name: value for name, value in model.sampling_defaults.items() if name not in body.model_fields_set}
    given = body.model_copy(update=defaults)
    biases = _biases(given.logit_bias, model)
    return Sampling(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k if given.top_k > 0 else None,
        min_p=given.min_p,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=given.repetition_penalty,
        bias_ids=ids_to_bytes(list(biases)),
        bias_values=np.array(list(biases.values()), dtype="<f4").tobytes(),
    )


def _biases(asked: dict[str, float], model: Model) -> dict[int, float]:
    """By token id. Raises InvalidRequest for a key that is none."""
    biases = {}
    for key, value in asked.items():
        id_ = int(key) if key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS else -1
        if not 0 <= id_ < model.vocab_size:
            message = f"logit_bias: {key[:MAX_QUOTED]!r} is no token id from 0 to {model.vocab_size - 1}"
            raise InvalidRequest(message, "logit_bias", "invalid_value")
        biases[id_] = value
    return biases


def _completion_tokens(body: GenerationRequest, model: Model, prompt: list[int], max_tokens: int | None, param: str) -> int:
    """How many tokens to ask for. Raises InvalidRequest when the context has no room for them."""
    room = model.max_length - len(prompt)
    wanted = room if max_tokens is None else max_tokens
    if room < (1 if max_tokens is None else max_tokens):
        asked = f"{len(prompt)} tokens of prompt" + (f" and {str(wanted)[:MAX_QUOTED]} of completion" if max_tokens else "")
        message = f"this model's context has {model.max_length} tokens, you asked for {asked}"
        raise InvalidRequest(message, param, "context_length_exceeded")
    if body.min_tokens > wanted:
        message = f"min_tokens={str(body.min_tokens)[:MAX_QUOTED]} is more than the {wanted} tokens at most"
        raise InvalidRequest(message, "min_tokens", "invalid_value")
    return wanted


def _check_logprobs(body: GenerationRequest, choices: int, prompt_tokens: int, completion_tokens: int) -> None:
    """Raises InvalidRequest when an answer could not be held."""
    asked = ((body.completion_scores, completion_tokens), (body.prompt_scores, prompt_tokens))
    values = choices * sum((1 + top) * tokens for top, tokens in asked if top is not None)
    if values > MAX_LOGPROBS:
        message = f"the answer may have {values} log-probabilities, at most {MAX_LOGPROBS} are given: lower max_tokens, n or top_logprobs"
        raise InvalidRequest(message, "logprobs", "invalid_value")


def check_ids(param: str, ids: list[int], end: int) -> None:
    """Raises InvalidRequest for an id that is not below `end`: it has no row in the model's embedding or, in a prompt, means nothing."""
    if ids and not 0 <= min(ids) <= max(ids) < end:
        bad = next(each for each in ids if not 0 <= each < end)
        raise InvalidRequest(f"token id {str(bad)[:MAX_QUOTED]} is not from 0 to {end - 1}", param, "invalid_value")
