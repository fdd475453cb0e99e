"""A request as the scheduler sees it: token ids in, token ids out, how to sample, when to stop."""

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from services.scheduler.ends import End
from services.scheduler.scores import Scores
from services.scheduler.timeline import Timeline
from shared.protocol.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FinishReason
from shared.protocol.plan import Int32s


class Key(NamedTuple):
    """Which request: the session, as numbered by the scheduler, and the request's number within its gateway."""

    session: int
    request: int


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float  # 0 is greedy
    top_k: int  # 0 is off
    top_p: float  # 1 is off
    min_p: float  # 0 is off
    seed: int  # int64
    presence_penalty: float = 0.0  # 0 is off, as is a frequency penalty of 0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # 1 is off
    biases: tuple[tuple[int, float], ...] = ()  # (id, value), no id twice

    @property
    def penalises(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0


@dataclass(frozen=True)
class RequestTimes:
    """When a request got where, in seconds on the scheduler's clock; None: it did not."""

    arrived_at: float
    admitted_at: float | None
    first_token_at: float | None
    ended_at: float

    @property
    def queue_s(self) -> float:
        """Until it had a slot or, without one, ended."""
        return (self.ended_at if self.admitted_at is None else self.admitted_at) - self.arrived_at

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def total_s(self) -> float:
        return self.ended_at - self.arrived_at


@dataclass(slots=True, eq=False)
class Request:
    """One attempt of one request. `output` is all of the completion so far, so that any group can go on from here."""

    key: Key
    attempt: int
    request_id: str  # the client's, for logs
    prompt_ids: Int32s
    output: "array[int]"  # int32; what a resumed request had already comes first
    sampling: Sampling
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_ids: tuple[int, ...]
    ending_ids: frozenset[int]  # the stop ids and, unless ignored, EOS
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""  # prefixes are shared among requests of the same one
    traceparent: str = ""  # W3C trace context of who asked
    scores: Scores | None = None  # where log-probabilities are wanted
    deadline: float | None = None  # on the clock of `now`, seconds
    end: End | None = None
    slot: int | None = None  # while running
    arrived_at: float = 0.0  # on the same clock, as are the next two
    admitted_at: float | None = None
    first_token_at: float | None = None  # of this attempt
    cached_tokens: int | None = None  # of the prompt, that were not computed anew when it was first admitted
    accepted_tokens: int | None = None  # of `output`, when its gateway has ended it
    preemptions: int = 0
    skips: int = 0  # how often others were admitted before it that came later
    moves: int = 0  # to another group, after it had begun at one
    unplanned_moves: int = 0  # groups that were lost while they computed it or at which it failed, and schedulers before us
    failed_at: tuple[object, ...] = ()  # groups at which a row of it has failed
    leaving: bool = False  # its group gives it up once what is on its way for it has come
    held_until: float | None = None  # while no group can take it
    timeline: Timeline = field(default_factory=Timeline)
    max_length: int = field(init=False)  # of its slot's tokens
    resumed_at: int = field(init=False)  # tokens that the client had when this attempt was submitted
    sent: int = field(init=False)  # tokens of `output` that the gateway has been sent, or had
    told_moves: int = field(init=False)  # of the unplanned ones, that the gateway knows of

    def __post_init__(self) -> None:
        # With max_tokens 0 the prompt's last chunk yields a token like any other, which nobody gets.
        self.max_length = len(self.prompt_ids) + max(self.max_tokens, 1)
        self.resumed_at = self.sent = len(self.output)
        self.told_moves = self.unplanned_moves

    @property
    def interrupted(self) -> bool:
        """It was taken and had to change its scheduler or its group: it goes before others, and is not refused for load."""
        return self.attempt > 1 or bool(self.resumed_at or self.moves)

    def times(self, ended_at: float) -> RequestTimes:
        return RequestTimes(self.arrived_at, self.admitted_at, self.first_token_at, ended_at)

    @property
    def needs_scores(self) -> bool:
        """Whether its prompt has to be computed anew, whatever is known of it, since every token's log-probability is wanted."""
        return self.scores is not None and self.scores.needs_prompt

    @property
    def prefill_ids(self) -> Int32s:
        """What a slot has to compute before the next token: prompt and completion so far."""
        return np.concatenate((self.prompt_ids, np.array(self.output, dtype=np.int32))) if self.output else self.prompt_ids

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.output)

    @property
    def reusable(self) -> int:
        """Tokens whose keys and values may be of use to others: the last one accepted has none yet."""
        accepted = len(self.output) if self.accepted_tokens is None else min(self.accepted_tokens, len(self.output))
        return len(self.prompt_ids) + accepted - 1

    def append(self, token: int) -> FinishReason | None:
        """Takes the next token of the completion; returns how it ends the request, if it does."""
        if not self.max_tokens:
            return FINISH_REASON_LENGTH
        self.output.append(token)
        if token in self.ending_ids or len(self.output) >= self.max_tokens:  # seldom: this runs for every token
            return self.finish_reason()
        return None

    def finish_reason(self) -> FinishReason | None:
        """Whether the completion so far is whole: the rule by which the device stops a row itself."""
        tokens = len(self.output)
        if tokens > self.min_tokens and self.output[-1] in self.ending_ids:
            return FINISH_REASON_STOP
        return FINISH_REASON_LENGTH if tokens >= self.max_tokens else None
