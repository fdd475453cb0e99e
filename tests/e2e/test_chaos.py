"""Whatever is killed, stopped or drained: every request ends with the right answer or a clear error, and nothing is left of it."""

import time
from pathlib import Path

import pytest

from tests.e2e.chaos import Chaos, Rest, chaotic_stack, show

REQUESTS = 2_000
MORE_DESCRIPTORS, MORE_BYTES = 8, 64 << 20  # than before, of connections that are just closing and of caches that have filled


@pytest.mark.timeout(400)
def test_sch_08_nothing_is_lost_while_everything_breaks(tmp_path: Path) -> None:
    with chaotic_stack(tmp_path) as stack:
        before, begun = Rest.of(stack), time.monotonic()
        chaos = Chaos(stack, seed=1, break_every_s=0.3)
        chaos.run(REQUESTS, lambda outcome: None)
        seconds, after = time.monotonic() - begun, Rest.of(stack)
    outcome = chaos.outcome
    show(outcome, seconds, before, after)
    assert not outcome.wrong
    assert outcome.requests == REQUESTS
    refused = sum(times for end, times in outcome.ends.items() if "too many requests" in end)  # the more, the busier the machine
    assert outcome.ends["answered"] > 0.8 * (REQUESTS - refused - outcome.ends["the client left"])
    assert outcome.ends["answered"] > REQUESTS / 5
    assert outcome.breaks.total() >= 5
    assert after.gateway_descriptors <= before.gateway_descriptors + MORE_DESCRIPTORS
    assert after.leader_descriptors <= before.leader_descriptors + MORE_DESCRIPTORS
    assert after.gateway_bytes <= before.gateway_bytes + MORE_BYTES
