"""One gateway's session, from here to it: tokens leave in batches, the first and the last of a request at once."""

import asyncio
from collections.abc import Callable

from services.scheduler.ends import Finished, Rejected
from services.scheduler.requests import Request
from shared.errors import PeerLost
from shared.protocol.generation_pb2 import GenerationSessionResponse, SessionHeartbeat, TokenBatch
from shared.rpc import Outbox

COALESCE_S = 0.002
MAX_UNSENT_BATCHES = 8  # a gateway that reads slowly gets fewer, larger batches
MAX_BATCH_LOGPROBS = 16_384  # tokens of a batch that come with log-probabilities: 2.8 MB
MAX_UPDATED_REQUESTS = 100_000  # one that does not read at all, but goes on to ask, is dropped


class GatewaySession:
    """`updated` may be called from anywhere; the batches go to `outbox`."""

    def __init__(self, number: int, gateway: str, clock: Callable[[], float]) -> None:
        self.number, self.gateway = number, gateway
        self.left = False  # the gateway has ended it in good order
        self.outbox: Outbox[GenerationSessionResponse] = Outbox(lambda: GenerationSessionResponse(heartbeat=SessionHeartbeat()))
        self._clock = clock
        self._updated: dict[Request, None] = {}
        self._rejected: list[tuple[int, int, Rejected]] = []  # (request, attempt, why)
        self._urgent = False
        self._last_batch_at = -COALESCE_S
        self._timer: asyncio.TimerHandle | None = None

    def update(self, request: Request) -> None:
        """The request has new tokens or has ended. `flush` follows."""
        self._updated[request] = None
        if request.end is not None or request.sent == request.resumed_at:
            self._urgent = True

    def reject(self, request: int, attempt: int, rejected: Rejected) -> None:
        """A request was not even taken. `flush` follows."""
        self._rejected.append((request, attempt, rejected))
        self._urgent = True

    def flush(self) -> None:
        """Sends what there is, or arranges for it to be sent soon."""
        if len(self._updated) + len(self._rejected) > MAX_UPDATED_REQUESTS:
            self.outbox.close(PeerLost(f"gateway {self.gateway} does not read"))
            return
        if not self._slow and (self._urgent or self._clock() - self._last_batch_at >= COALESCE_S):
            self._send()
        elif self._timer is None:
            self._arm_timer()

    def end(self) -> None:
        """Sends what there is, and ends the session in good order."""
        if self._updated or self._rejected:
            self._send()
        self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.outbox.close()

    @property
    def _slow(self) -> bool:
        return len(self.outbox) >= MAX_UNSENT_BATCHES

    def _arm_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(COALESCE_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._slow:
            self._arm_timer()
        elif self._updated or self._rejected:
            self._send()

    def _send(self) -> None:
        batch, room = TokenBatch(), MAX_BATCH_LOGPROBS
        later: dict[Request, None] = {}
        for request in self._updated:
            room, whole = _add(batch, request, room)
            if not whole:
                later[request] = None
        for number, attempt, rejected in self._rejected:
            _add_rejected(batch, number, attempt, rejected)
        self._updated = later
        self._rejected.clear()
        self._urgent = False
        self._last_batch_at = self._clock()
        self.outbox.put(GenerationSessionResponse(batch=batch))
        if later and self._timer is None:
            self._arm_timer()


def _add(batch: TokenBatch, request: Request, room: int) -> tuple[int, bool]:
    """room: for tokens with log-probabilities; what does not fit is left for the next batch.

    Returns the room that remains, and whether all is in the batch.
    """
    number, attempt, tokens = request.key.request, request.attempt, len(request.output)
    cached, scores = request.cached_tokens or 0, request.scores
    end = tokens
    if request.unplanned_moves > request.told_moves:
        request.told_moves = request.unplanned_moves
        batch.tokens.add(request=number, attempt=attempt, first_index=request.sent, unplanned_moves=request.told_moves)
    if scores is not None:
        if len(scores.prompt) and room:
            before = len(scores.prompt)
            first, values = scores.send_prompt(room)
            room -= before - len(scores.prompt)
            batch.tokens.add(request=number, attempt=attempt, first_index=request.sent, prompt_logprobs=values, first_position=first)
        if len(scores.prompt):
            return room, False
        if scores.top is not None:
            end = min(tokens, request.sent + room)
            room -= end - request.sent
    if end > request.sent:
        news = batch.tokens.add(request=number, attempt=attempt, first_index=request.sent, ids=request.output[request.sent : end].tobytes())
        if request.sent == request.resumed_at:
            news.cached_tokens = cached
        if scores is not None and scores.top is not None:
            news.logprobs.CopyFrom(scores.send_completion(end - request.sent))
        request.sent = end
    if end < tokens:
        return room, False
    match request.end:
        case Finished(reason, detail):
            batch.finished.add(
                request=number, attempt=attempt, reason=reason, completion_tokens=tokens, cached_tokens=cached, detail=detail
            )
        case Rejected() as rejected:
            _add_rejected(batch, number, attempt, rejected)
    return room, True


def _add_rejected(batch: TokenBatch, number: int, attempt: int, rejected: Rejected) -> None:
    batch.rejected.add(
        request=number, attempt=attempt, reason=rejected.reason, detail=rejected.detail, retry_after_ms=rejected.retry_after_ms
    )
