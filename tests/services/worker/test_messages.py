"""What crosses the socket between a rank and its supervisor."""

import numpy as np
import pytest

from services.worker.messages import MAX_PACKET_BYTES, Scored, decode, encode, scored, socket_pair
from shared.protocol.logprobs import LOGPROB


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_log_probabilities_cross_in_packets_that_fit(count: int) -> None:
    records = np.random.default_rng(count).integers(0, 256, (count, LOGPROB.itemsize), dtype=np.uint8).view(LOGPROB)[:, 0]
    ours, theirs = socket_pair()
    with ours, theirs:
        arrived = []
        for message in scored(7, records):
            ours.sendall(encode(message))
            arrived.append(decode(theirs.recv(MAX_PACKET_BYTES)))
    assert all(isinstance(message, Scored) and message.plan == 7 for message in arrived)
    assert b"".join(message.records.tobytes() for message in arrived if isinstance(message, Scored)) == records.tobytes()
