"""A Submit becomes a request, or is refused: nothing that a gateway sends is believed."""

import math
from array import array

import numpy as np

from services.scheduler.model import Model
from services.scheduler.requests import Key, Request, Sampling
from services.scheduler.scores import Scores
from shared.errors import LockstepError
from shared.protocol.generation_pb2 import REJECT_REASON_INVALID, REJECT_REASON_TOO_LONG, RejectReason, Submit
from shared.protocol.generation_pb2 import Sampling as SamplingMessage
from shared.protocol.logprobs import MAX_TOP_LOGPROBS
from shared.protocol.plan import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_PENALTY,
    MAX_REPETITION,
    MAX_STOP_IDS,
    Int32s,
    PlanError,
    ids_from_bytes,
)

MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31 - 1
MAX_PRIORITY = 1_000
MAX_TEXT = 256  # characters of an id or a name
MAX_AGE_MS = 86_400_000  # what is older keeps its rank no better


_NO_IDS = np.empty(0, dtype=np.int32)


class Refused(LockstepError):
    """A request that is never acceptable."""

    def __init__(self, detail: str, reason: RejectReason = REJECT_REASON_INVALID) -> None:
        super().__init__(detail)
        self.reason = reason


def to_request(submit: Submit, session: int, model: Model, now: float) -> Request:
    """Raises Refused, saying what was got and what is allowed."""
    prompt = _ids("prompt_ids", submit.prompt_ids, model)
    delivered = _ids("delivered_ids", submit.delivered_ids, model)
    stop_ids = tuple(_ids("stop_token_ids", submit.stop_token_ids, model).tolist())
    if not len(prompt):
        raise Refused("the prompt is empty")
    if len(stop_ids) > MAX_STOP_IDS:
        raise Refused(f"at most {MAX_STOP_IDS} stop token ids, got {len(stop_ids)}")
    if submit.attempt < 1:
        raise Refused("attempts count from 1")
    scores = _scores(submit, prompt, delivered)
    _between("max_tokens", submit.max_tokens, 0 if submit.HasField("prompt_logprobs") else 1, math.inf)  # the context bounds it below
    _between("min_tokens", submit.min_tokens, 0, submit.max_tokens)
    _between("priority", submit.priority, -MAX_PRIORITY, MAX_PRIORITY)
    for name in ("request_id", "tenant", "traceparent", "cache_salt"):
        if len(getattr(submit, name)) > MAX_TEXT:
            raise Refused(f"{name} has more than {MAX_TEXT} characters")
    if len(prompt) + max(submit.max_tokens, 1) > model.max_length:
        detail = f"{len(prompt)} prompt tokens and {submit.max_tokens} for the completion exceed the {model.max_length} that fit"
        raise Refused(detail, REJECT_REASON_TOO_LONG)
    if len(delivered) > submit.max_tokens:
        raise Refused(f"{len(delivered)} tokens were delivered of at most {submit.max_tokens}")
    return Request(
        key=Key(session, submit.request),
        attempt=submit.attempt,
        request_id=submit.request_id,
        prompt_ids=prompt,
        output=array("i", delivered.tolist()),
        sampling=_sampling(submit.sampling, model),
        scores=scores,
        max_tokens=submit.max_tokens,
        min_tokens=submit.min_tokens,
        ignore_eos=submit.ignore_eos,
        stop_ids=stop_ids,
        ending_ids=frozenset(stop_ids) if submit.ignore_eos else model.eos_ids.union(stop_ids),
        priority=submit.priority,
        tenant=submit.tenant,
        cache_salt=submit.cache_salt,
        traceparent=submit.traceparent,
        deadline=now + submit.deadline_ms / 1e3 if submit.HasField("deadline_ms") else None,
        arrived_at=now - min(submit.age_ms, MAX_AGE_MS) / 1e3,
        unplanned_moves=submit.unplanned_moves,
    )


def _scores(submit: Submit, prompt: Int32s, delivered: Int32s) -> Scores | None:
    """Who has the first tokens already has the prompt's log-probabilities too."""
    _between("logprobs", submit.logprobs, 0, MAX_TOP_LOGPROBS)
    _between("prompt_logprobs", submit.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
    top = submit.logprobs if submit.HasField("logprobs") and submit.max_tokens else None
    prompt_top = submit.prompt_logprobs if submit.HasField("prompt_logprobs") and not len(delivered) else None
    return None if top is None and prompt_top is None else Scores(len(prompt), top, prompt_top)


def _sampling(message: SamplingMessage, model: Model) -> Sampling:
    if not message.HasField("seed"):
        raise Refused("no seed: the gateway sets one always")
    sampling = Sampling(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        seed=message.seed,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        biases=_biases(message, model),
    )
    _between("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _between("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _between("repetition_penalty", sampling.repetition_penalty, 1 / MAX_REPETITION, MAX_REPETITION)
    _between("temperature", sampling.temperature, 0.0, MAX_TEMPERATURE)
    _between("top_k", sampling.top_k, 0, MAX_TOP_K)
    _between("top_p", sampling.top_p, 0.0, 1.0)
    _between("min_p", sampling.min_p, 0.0, 1.0)
    return sampling


def _biases(message: SamplingMessage, model: Model) -> tuple[tuple[int, float], ...]:
    if not message.bias_ids and not message.bias_values:
        return ()
    ids = _ids("bias_ids", message.bias_ids, model)
    if len(message.bias_values) != 4 * len(ids) or len(ids) > MAX_BIASES:
        raise Refused(f"at most {MAX_BIASES} biases, a float32 each, got {len(ids)} ids and {len(message.bias_values)} bytes of values")
    if len(np.unique(ids)) != len(ids):
        raise Refused("bias_ids name an id twice")
    values = np.frombuffer(message.bias_values, dtype="<f4").tolist()
    for value in values:
        _between("bias_values", value, -MAX_BIAS, MAX_BIAS)
    return tuple(zip(ids.tolist(), values, strict=True))


def _ids(name: str, data: bytes, model: Model) -> Int32s:
    if not data:
        return _NO_IDS
    try:
        ids = ids_from_bytes(data)
    except PlanError as error:
        raise Refused(f"{name}: {error}") from error
    if len(ids) and ids.view(np.uint32).max() >= model.vocab_size:  # of which a negative one is, too
        raise Refused(f"{name} has ids from {ids.min()} to {ids.max()}; the vocabulary has {model.vocab_size}")
    return ids


def _between(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # nor is NaN
        raise Refused(f"{name} must be from {least} to {most}, got {value}")
