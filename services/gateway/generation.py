"""One request at the scheduler, and the sequence of token ids that it yields: this gateway owns it."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.errors import ClientGone, GenerationFailed, InvalidRequest, Overloaded, RequestError, TimedOut, Unavailable
from services.gateway.scores import Score, scores
from shared.errors import ProtocolError
from shared.protocol.generation_pb2 import Finished, FinishReason, Rejected, RejectReason, Submit, Tokens
from shared.protocol.plan import PlanError, id_list, ids_to_bytes

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0  # where the scheduler does not say
MAX_DETAIL = 200  # characters of the scheduler's words that a client gets
MAX_MOVES = 3  # of a request, that nobody planned: one that takes along all that have it must end


@dataclass(frozen=True)
class Ending:
    """How a generation ended well."""

    stopped: bool  # by an end-of-sequence or stop token id, which is the last id; else by length


class Generation:
    """One request. The session's reader feeds it synchronously; `take` gives what has come since.

    `wake` is set whenever there is something to take. Ids that nobody takes are merged; beyond `max_unread` the request is given up.
    What came stays when the scheduler is lost or the sequence breaks: the next attempt goes on after it.
    """

    def __init__(
        self,
        submit: Submit,
        wake: asyncio.Event,
        max_unread: int,
        on_close: Callable[["Generation", int, bool], None],
        on_broken: Callable[["Generation"], None],
    ) -> None:
        """on_close: told once, with the number of ids that count, and whether they are the whole answer. on_broken: another attempt is
        needed."""
        self.submit = submit
        self.prompt_tokens = len(submit.prompt_ids) // 4  # once: each look at the field copies it
        self._has_scores, self._has_prompt_scores = submit.HasField("logprobs"), submit.HasField("prompt_logprobs")
        self.sent = False  # some attempt
        self._moves = 0  # that nobody planned, at schedulers and between them
        self._submitted_at = time.monotonic()
        self._deadline = self._submitted_at + submit.deadline_ms / 1e3 if submit.HasField("deadline_ms") else None
        self.ids: list[int] = []  # all that were accepted
        self.scores: list[Score] = []  # of each, where the request asks for them
        self.prompt_scores: list[Score] = []  # of the prompt's tokens from the second on, where asked for; all before the first id
        self.arrived_at = 0.0  # when the first of the ids that nobody has taken came, on the monotonic clock
        self.ending: Ending | None = None
        self.cached_tokens = 0  # of the prompt, that were not computed anew: known with the first ids
        self._error: RequestError | None = None
        self._wake = wake
        self._taken = 0
        self._max_unread = max_unread
        self._on_close, self._on_broken = on_close, on_broken
        self._closed = False

    @property
    def request(self) -> int:
        return self.submit.request

    @property
    def over(self) -> bool:
        """No more ids will come."""
        return self.ending is not None or self._error is not None

    def take(self) -> list[int]:
        """The ids since the last call. Raises the RequestError that ended the request, at once."""
        if self._error is not None:
            raise self._error
        ids = self.ids[self._taken :]
        self._taken = len(self.ids)
        return ids

    def close(self, accepted_tokens: int | None = None) -> None:
        """Nothing more is wanted: the scheduler is told to stop, unless it has finished.

        accepted_tokens: of the ids, that make up the whole answer; None when it is given up.
        """
        if not self._closed:
            self._closed = True
            whole = accepted_tokens is not None
            self._on_close(self, accepted_tokens if accepted_tokens is not None else len(self.ids), whole)

    def next_submit(self, *, planned: bool) -> Submit | None:
        """What to send to a scheduler: the first attempt, or the next one, which goes on after all that came.

        planned: the one before was given up in good order. None when the request has been moved too often, which ends it.
        """
        now, submit = time.monotonic(), self.submit
        if self.sent:
            self._moves += not planned
            if self._moves > MAX_MOVES:
                self.fail(Unavailable("the backend was lost too often: try again later", retry_after_s=RETRY_AFTER_S))
                return None
            submit.attempt += 1
            submit.delivered_ids = ids_to_bytes(self.ids)
        if self._deadline is not None:
            submit.deadline_ms = max(round((self._deadline - now) * 1e3), 1)
        submit.age_ms = round((now - self._submitted_at) * 1e3)
        submit.unplanned_moves = self._moves
        self.sent = True
        return submit

    def finish_at_once(self) -> None:
        """The end of a request for no tokens."""
        self.ending = Ending(stopped=False)
        self._wake.set()

    def fail(self, error: RequestError) -> None:
        """Ends the request with an error, unless it is over."""
        if not self.over:
            self._error = error
            self._wake.set()

    def on_tokens(self, tokens: Tokens) -> None:
        """Ids of the current attempt. Those that are here already must be the same; a gap or a difference breaks the sequence."""
        if self.over or tokens.attempt != self.submit.attempt:
            return
        self._moves = max(self._moves, tokens.unplanned_moves)
        self._cached(tokens.cached_tokens)
        first = tokens.first_index
        try:
            ids = id_list(tokens.ids)
            new_scores = scores(tokens.logprobs, len(ids)) if self._has_scores else []
            if self._has_prompt_scores and tokens.HasField("prompt_logprobs"):
                self._accept_prompt_scores(tokens)
        except (PlanError, ProtocolError) as error:
            self._broken(str(error))
            return
        known = self.ids[first : first + len(ids)]
        if first > len(self.ids):
            self._broken(f"ids from {first} on, where {len(self.ids)} should follow")
        elif ids[: len(known)] != known:
            self._broken(f"other ids from {first} on than before")
        else:
            self.scores += new_scores[len(known) :]
            self._accept(ids[len(known) :])

    def on_finished(self, finished: Finished) -> None:
        """The end, after the last ids."""
        if self.over or finished.attempt != self.submit.attempt:
            return
        if finished.reason == FinishReason.FINISH_REASON_UNAVAILABLE:
            self.fail(Unavailable(f"{finished.detail[:MAX_DETAIL]}: try again later", retry_after_s=RETRY_AFTER_S))
        elif finished.reason == FinishReason.FINISH_REASON_DEADLINE:
            self.fail(TimedOut("the request took too long"))  # the scheduler's clock was a little ahead of ours
        elif finished.reason not in (FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH):
            self.fail(GenerationFailed(f"the scheduler ended the request with reason {finished.reason}: {finished.detail}"))
        elif finished.completion_tokens != len(self.ids):
            self._broken(f"the end after {finished.completion_tokens} ids, of which {len(self.ids)} came")
        else:
            self._cached(finished.cached_tokens)
            self.ending = Ending(finished.reason == FinishReason.FINISH_REASON_STOP)
            self._wake.set()

    def on_rejected(self, rejected: Rejected) -> None:
        """The scheduler does not take the request."""
        if not self.over and rejected.attempt == self.submit.attempt:
            self.fail(rejection(rejected))

    def _cached(self, tokens: int) -> None:
        self.cached_tokens = max(self.cached_tokens, min(tokens, self.prompt_tokens))

    def _accept_prompt_scores(self, tokens: Tokens) -> None:
        """Raises ProtocolError unless they follow those that are here; another attempt brings them anew."""
        first = tokens.first_position - 1
        if not 0 <= first <= len(self.prompt_scores):
            raise ProtocolError(f"log-probabilities of the prompt from {tokens.first_position} on, {len(self.prompt_scores)} are here")
        self.prompt_scores[first:] = scores(tokens.prompt_logprobs, len(tokens.prompt_logprobs.values) // 4)

    def _accept(self, ids: list[int]) -> None:
        if self._taken == len(self.ids):
            self.arrived_at = time.monotonic()
        self.ids += ids
        unread = len(self.ids) - self._taken
        if unread > self._max_unread:
            self.fail(ClientGone(f"the client has left {unread} tokens unread"))
            self.close()
        self._wake.set()

    def _broken(self, what: str) -> None:
        """The sequence of this attempt cannot be trusted; what had come before can."""
        logger.error("request %s, attempt %d got %s", self.submit.request_id, self.submit.attempt, what)
        self._on_broken(self)


def rejection(rejected: Rejected) -> RequestError:
    """The error that stands for a refusal by the scheduler."""
    retry_after_s = rejected.retry_after_ms / 1000 or RETRY_AFTER_S
    match rejected.reason:
        case RejectReason.REJECT_REASON_TOO_LONG:
            return InvalidRequest(
                rejected.detail[:MAX_DETAIL] or "the request is longer than can be served", code="context_length_exceeded"
            )
        case RejectReason.REJECT_REASON_INVALID:
            return InvalidRequest(rejected.detail[:MAX_DETAIL] or "the request is not valid")
        case RejectReason.REJECT_REASON_OVERLOADED:
            return Overloaded("too many requests: try again later", code="rate_limit_exceeded", retry_after_s=retry_after_s)
        case RejectReason.REJECT_REASON_DEADLINE:
            return Overloaded("the request would not start in time", code="rate_limit_exceeded", retry_after_s=retry_after_s)
        case RejectReason.REJECT_REASON_UNAVAILABLE:
            return Unavailable("no worker is ready: try again later", retry_after_s=retry_after_s)
        case _:
            return GenerationFailed(f"refused with reason {rejected.reason}: {rejected.detail}")
