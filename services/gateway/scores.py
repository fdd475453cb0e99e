"""Log-probabilities of tokens as a scheduler sends them."""

from typing import NamedTuple

import numpy as np

from shared.errors import ProtocolError
from shared.protocol.generation_pb2 import Logprobs
from shared.protocol.logprobs import NO_TOP_ID


class Score(NamedTuple):
    """Of one token: the model's own, before temperature, penalties, biases and filters."""

    logprob: float
    top: list[tuple[int, float]]  # the likeliest ids, with their log-probabilities, falling


def scores(message: Logprobs, count: int) -> list[Score]:
    """One a token. Raises ProtocolError unless the message is of `count` tokens."""
    values, top = np.frombuffer(message.values, dtype="<f4"), message.top
    ids, likeliest = np.frombuffer(message.top_ids, dtype="<i4"), np.frombuffer(message.top_values, dtype="<f4")
    if not len(values) == count or not len(ids) == len(likeliest) == count * top:
        raise ProtocolError(f"log-probabilities of {count} tokens and {top} ids each: {len(values)}, {len(ids)} and {len(likeliest)} came")
    rows = zip(values.tolist(), ids.reshape(count, top).tolist(), likeliest.reshape(count, top).tolist(), strict=True)
    return [Score(value, [pair for pair in zip(row, logprobs, strict=True) if pair[0] != NO_TOP_ID]) for value, row, logprobs in rows]
