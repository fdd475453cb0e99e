import numpy as np
import pytest

from shared.errors import ProtocolError
from shared.protocol.logprobs import LOGPROB, logprobs_from_bytes


def test_records_travel_as_they_are() -> None:
    records = np.zeros(3, dtype=LOGPROB)
    records["position"], records["logprob"], records["top_ids"][1, 19] = [4, 5, 6], [-0.5, -1e-3, -np.inf], 7
    assert logprobs_from_bytes(records.tobytes()).tobytes() == records.tobytes()
    assert len(logprobs_from_bytes(b"")) == 0


def test_half_a_record_is_refused() -> None:
    with pytest.raises(ProtocolError, match="records of 172 bytes, got 100"):
        logprobs_from_bytes(bytes(100))
