"""How log-probabilities cross the wires: records from a worker, one a token that was sampled or that a prompt holds."""

import numpy as np
from numpy.typing import NDArray

from shared.errors import ProtocolError

MAX_TOP_LOGPROBS = 20  # likeliest ids for each token
NO_TOP_ID = -1  # past the last id of a small vocabulary; its log-probability is -inf

LOGPROB = np.dtype(
    [
        ("row", "<i4"),  # of the plan: decode rows, then prefill rows
        ("position", "<i4"),  # of the token in its sequence
        ("logprob", "<f4"),  # of the token; the model's own: before temperature, penalties, biases and filters
        ("top_ids", "<i4", (MAX_TOP_LOGPROBS,)),  # the likeliest first, of equals the lower id
        ("top_logprobs", "<f4", (MAX_TOP_LOGPROBS,)),
    ]
)

Logprobs = NDArray[np.void]  # [n] of LOGPROB
NO_LOGPROBS: Logprobs = np.empty(0, dtype=LOGPROB)


def logprobs_from_bytes(data: bytes | memoryview) -> Logprobs:
    """The records in `data`, a view. Raises ProtocolError when the bytes are not whole records."""
    if len(data) % LOGPROB.itemsize:
        raise ProtocolError(f"log-probabilities are records of {LOGPROB.itemsize} bytes, got {len(data)} bytes")
    return np.frombuffer(data, dtype=LOGPROB)
