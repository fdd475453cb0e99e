"""Log-probabilities of tokens as a scheduler sends them."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.errors import ProtocolError
from shared.protocol.generation_pb2 import Logprobs
from shared.protocol.logprobs import NO_TOP_ID


class Score(NamedTuple):
    """Of one token: the model's own, before temperature, penalties, biases and filters.

    The likeliest ids stay as they came, in arrays of whole messages: a batch may bring a third of a million.
    """

    logprob: float
    top_ids: NDArray[np.int32]  # the likeliest first
    top_logprobs: NDArray[np.float32]  # theirs

    @property
    def top(self) -> list[tuple[int, float]]:
        """The likeliest ids, with their log-probabilities, falling."""
        pairs = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        return [pair for pair in pairs if pair[0] != NO_TOP_ID]


def scores(message: Logprobs, count: int) -> list[Score]:
    """One a token. Raises ProtocolError unless the message is of `count` tokens."""
    values, top = np.frombuffer(message.values, dtype="<f4"), message.top
    ids, likeliest = np.frombuffer(message.top_ids, dtype="<i4"), np.frombuffer(message.top_values, dtype="<f4")
    if not len(values) == count or not len(ids) == len(likeliest) == count * top:
        raise ProtocolError(f"log-probabilities of {count} tokens and {top} ids each: {len(values)}, {len(ids)} and {len(likeliest)} came")
    rows: tuple[Iterable[NDArray[np.int32]], Iterable[NDArray[np.float32]]] = (ids.reshape(count, top), likeliest.reshape(count, top))
    if not top:  # without a view for each token
        rows = itertools.repeat(ids, count), itertools.repeat(likeliest, count)
    return list(map(Score, values.tolist(), *rows))
