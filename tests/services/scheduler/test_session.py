"""When batches leave; the clock is the test's, the timer is the loop's."""

import asyncio

from services.scheduler.ends import Finished, Rejected
from services.scheduler.requests import Request
from services.scheduler.session import COALESCE_S, MAX_UNSENT_BATCHES, MAX_UPDATED_REQUESTS, GatewaySession
from shared.protocol import generation_pb2 as pb
from shared.protocol.plan import ids_from_bytes
from tests.services.scheduler.build import make_request


class Harness:
    def __init__(self) -> None:
        self.now = 100.0
        self.session = GatewaySession(1, "gateway", lambda: self.now)
        self.outgoing = aiter(self.session.outbox)

    def token(self, request: Request, token: int, after_s: float = 0.0, end: Finished | Rejected | None = None) -> None:
        self.now += after_s
        request.output.append(token)
        request.end = end
        self.session.update(request)
        self.session.flush()

    async def batch(self) -> pb.TokenBatch:
        async with asyncio.timeout(30):
            return (await anext(self.outgoing)).batch


async def test_first_and_last_tokens_leave_at_once_and_others_together() -> None:
    harness, request = Harness(), make_request(1, [1], 9)
    harness.token(request, 11)
    assert len(harness.session.outbox) == 1
    harness.token(request, 12, after_s=0.0001)
    harness.token(request, 13, after_s=0.0001)
    assert len(harness.session.outbox) == 1
    harness.token(request, 14, after_s=0.0001, end=Finished(pb.FINISH_REASON_STOP))
    first, rest = await harness.batch(), await harness.batch()
    assert [(t.first_index, ids_from_bytes(t.ids).tolist()) for t in first.tokens] == [(0, [11])]
    assert [(t.first_index, ids_from_bytes(t.ids).tolist()) for t in rest.tokens] == [(1, [12, 13, 14])]
    assert [(f.reason, f.completion_tokens) for f in rest.finished] == [(pb.FINISH_REASON_STOP, 4)]


async def test_a_lost_group_is_told_once_and_before_any_token() -> None:
    harness, request = Harness(), make_request(1, [1], 9)
    request.unplanned_moves = 2
    harness.session.update(request)
    harness.session.flush()
    harness.token(request, 11, after_s=2 * COALESCE_S)
    told, tokens = await harness.batch(), await harness.batch()
    assert [(t.first_index, t.unplanned_moves, len(t.ids)) for t in told.tokens] == [(0, 2, 0)]
    assert [(t.first_index, t.unplanned_moves, len(t.ids)) for t in tokens.tokens] == [(0, 0, 4)]


async def test_a_token_waits_for_the_timer_at_most() -> None:
    harness, request = Harness(), make_request(1, [1], 9)
    harness.token(request, 11)
    await harness.batch()
    harness.token(request, 12)
    assert ids_from_bytes((await harness.batch()).tokens[0].ids).tolist() == [12]


async def test_tokens_that_come_rarely_leave_at_once() -> None:
    harness, request = Harness(), make_request(1, [1], 9)
    for token in range(5):
        harness.token(request, token, after_s=2 * COALESCE_S)
    assert len(harness.session.outbox) == 5


async def test_a_slow_gateway_gets_fewer_larger_batches() -> None:
    harness, request = Harness(), make_request(1, [1], 900)
    for token in range(100):
        harness.token(request, token, after_s=2 * COALESCE_S)
    assert len(harness.session.outbox) == MAX_UNSENT_BATCHES
    got: list[int] = []
    while len(got) < 100:
        for tokens in (await harness.batch()).tokens:
            assert tokens.first_index == len(got)
            got.extend(ids_from_bytes(tokens.ids).tolist())
    assert got == list(range(100))


async def test_a_gateway_that_does_not_read_is_dropped() -> None:
    harness = Harness()
    rejected = Rejected(pb.REJECT_REASON_INVALID, "no")
    for number in range(MAX_UPDATED_REQUESTS + MAX_UNSENT_BATCHES + 1):
        harness.session.reject(number, 1, rejected)
        harness.session.flush()
    harness.session.outbox.put(pb.GenerationSessionResponse())
    assert len(harness.session.outbox) == MAX_UNSENT_BATCHES  # closed: nothing is taken any more


async def test_tokens_before_the_end_and_rejections_are_sent() -> None:
    harness, request = Harness(), make_request(1, [1], 9, output=(5, 6))
    harness.token(request, 7)
    assert (await harness.batch()).tokens[0].first_index == 2
    harness.session.reject(2, 1, Rejected(pb.REJECT_REASON_OVERLOADED, "full", 1_500))
    harness.session.flush()
    (rejected,) = (await harness.batch()).rejected
    assert (rejected.request, rejected.reason, rejected.retry_after_ms) == (2, pb.REJECT_REASON_OVERLOADED, 1_500)
