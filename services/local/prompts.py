"""What an offline caller asks: prompts and how to go on with them, checked here and made into messages to the scheduler."""

import contextlib
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from shared.errors import LockstepError
from shared.protocol import generation_pb2 as pb
from shared.protocol.plan import Int32s, ids_to_bytes

Prompt = str | Sequence[int] | Int32s

SEED_BITS = 63
MAX_SHOWN = 60  # characters of a prompt that is refused


class InvalidPrompt(LockstepError):
    """A prompt that the model cannot take; nothing of its call was computed."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; the same words, meanings and bounds as in the HTTP API."""

    max_tokens: int = 256
    temperature: float = 1.0  # 0: the most likely token
    top_k: int = 0  # 0 or -1: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: drawn anew for each prompt
    min_tokens: int = 0  # no end of sequence before
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()  # end the completion like an end of sequence
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by id
    logprobs: int | None = None  # of the completion's tokens, and so many of the likeliest ids at each place; None: none
    prompt_logprobs: int | None = None  # the same of the prompt; with it max_tokens may be 0
    cache_salt: str | None = None  # prefixes are shared among prompts of the same salt only


def checked_text(index: int, text: str) -> str:
    """The text of prompt number `index`. Raises InvalidPrompt for one that no bytes stand for."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidPrompt(f"prompt {index}: half of a surrogate pair at character {error.start} of the text") from error
    return text


def checked_ids(index: int, prompt: Sequence[int] | Int32s, vocab_size: int) -> Int32s:
    """The ids `[tokens]` of prompt number `index`. Raises InvalidPrompt when they are none."""
    try:
        ids = _array(prompt)
    except (ValueError, OverflowError) as error:  # lists of different lengths in it, or numbers beyond all ids
        raise InvalidPrompt(f"prompt {index}: a text or a list of token ids, got {_shown(prompt)}") from error
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
        raise InvalidPrompt(f"prompt {index}: a text or a list of at least one token id, got {_shown(prompt)}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise InvalidPrompt(f"prompt {index}: ids from {ids.min()} to {ids.max()}, the vocabulary has {vocab_size}")
    return ids.astype(np.int32, copy=not isinstance(prompt, list))  # arrays may be the caller's own


def submit(index: int, prompt_ids: Int32s, sampling: Sampling, max_length: int) -> pb.Submit:
    """Raises InvalidPrompt for a value of the sampling that no message can hold, or more tokens than `max_length` with the prompt's;
    other values are the scheduler's to refuse."""
    try:
        message = _message(prompt_ids, sampling)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidPrompt(f"prompt {index}: its sampling has a value of the wrong kind or size: {error}; got {sampling}") from error
    if len(prompt_ids) + message.max_tokens > max_length:
        raise InvalidPrompt(f"prompt {index}: {len(prompt_ids)} tokens and {message.max_tokens} more exceed the {max_length} that fit")
    return message


def _message(prompt_ids: Int32s, sampling: Sampling) -> pb.Submit:
    for each in fields(sampling):
        if getattr(sampling, each.name) is None and each.default is not None:  # a message would have 0 in its place
            raise TypeError(f"{each.name} is None")
    return pb.Submit(
        prompt_ids=ids_to_bytes(prompt_ids),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=ids_to_bytes(np.array(sampling.stop_token_ids, dtype=np.int32)),
        cache_salt=sampling.cache_salt,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        sampling=pb.Sampling(
            temperature=sampling.temperature,
            top_k=0 if sampling.top_k == -1 else sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            bias_ids=ids_to_bytes(np.array(list(sampling.logit_bias), dtype=np.int32)),
            bias_values=np.array(list(sampling.logit_bias.values()), dtype="<f4").tobytes(),
        ),
    )


def _array(prompt: Sequence[int] | Int32s) -> NDArray[np.generic]:
    """As numpy has it. A list of ids in half of the time that numpy takes to find out what it is."""
    if isinstance(prompt, list) and prompt and type(prompt[0]) is int:
        ids = np.empty(len(prompt), dtype=np.int32)
        with contextlib.suppress(struct.error):  # numpy can say what is no id, or beyond all
            struct.pack_into(f"{len(prompt)}i", ids.data, 0, *prompt)
            return ids
    return np.asarray(prompt)


def _shown(prompt: object) -> str:
    text = repr(prompt)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
