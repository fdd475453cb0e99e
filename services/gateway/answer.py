"""The answer to one HTTP request: the text of its generations, as it comes."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from services.gateway.errors import GenerationFailed, TimedOut
from services.gateway.generation import Generation
from services.gateway.scores import Score
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stops import StopMatcher
from shared.protocol.plan import ids_from_bytes

FinishReason = Literal["stop", "length"]
MIN_TIMER_S = 0.01


class ScoredToken(NamedTuple):
    """A token beside its log-probability, where the request asks for those."""

    id: int
    text: str  # what it adds to the text: nothing, while a character is incomplete
    score: Score | None  # None of a prompt's first token, which nothing goes before


@dataclass(slots=True)  # not frozen: that costs three times as much, and there is one for each token
class Delta:
    """New text of one choice, with the tokens that begin in it; at its end with the reason."""

    index: int
    text: str
    finish_reason: FinishReason | None
    tokens: Sequence[ScoredToken] = ()


@dataclass(frozen=True)
class Echo:
    """A prompt that its answer repeats."""

    text: str
    pieces: Sequence[str]  # of each token


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Choice:
    """One generation as text: without the token that ended it, up to the first stop string."""

    def __init__(
        self,
        index: int,
        generation: Generation,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        terminal_ids: frozenset[int],
        echo: Echo | None = None,
    ) -> None:
        """`terminal_ids` may end the generation: their text is not shown before it is known that they did not."""
        self.index = index
        self.generation = generation
        self.finish_reason: FinishReason | None = None
        self.completion_tokens = 0
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._terminal_ids = terminal_ids
        self._terminal: list[int] = []  # the last id, if it is a terminal one
        self._echo = echo
        self._has_scores = generation.submit.HasField("logprobs")
        self._one_by_one = bool(stops) or self._has_scores  # to know which token completes a stop string, and what text is whose
        self._tokens: deque[tuple[int, ScoredToken]] = deque()  # those not given yet, with the place in the text where each begins
        self._told, self._shown = 0, 0  # characters of all tokens, and of the text that was given

    @property
    def mean_logprob(self) -> float:
        """Of the tokens of the completion, where the request asks for log-probabilities."""
        scores = self.generation.scores[: self.completion_tokens]
        return sum(score.logprob for score in scores) / max(len(scores), 1)

    def advance(self) -> Delta | None:
        """What is new, if anything. Raises the RequestError that ended the generation."""
        if self.finish_reason is not None:
            return None
        ids = self._terminal + self.generation.take()
        ending = self.generation.ending
        self._terminal = []
        if ids and (ending.stopped if ending else ids[-1] in self._terminal_ids):
            self._terminal = [ids.pop()]
        text = self._repeat_prompt() if ids or ending else ""
        text += self._show(ids)
        if ending is not None and self.finish_reason is None:
            self.completion_tokens += len(self._terminal)
            text += self._matcher.push(self._detokenizer.flush())
            self.finish_reason = "stop" if ending.stopped or self._matcher.matched else "length"
            text += self._matcher.flush()
        if self.finish_reason is not None:
            self.generation.close(self.completion_tokens)
        self._shown += len(text)
        if not text and self.finish_reason is None:
            return None
        return Delta(self.index, text, self.finish_reason, self._begun_tokens() if self._tokens else ())

    def _repeat_prompt(self) -> str:
        """At the beginning. Raises GenerationFailed when the prompt's log-probabilities have not come."""
        if self._echo is None:
            return ""
        echo, self._echo = self._echo, None
        if self.generation.submit.HasField("prompt_logprobs"):
            ids = ids_from_bytes(self.generation.submit.prompt_ids).tolist()
            scores = [None, *self.generation.prompt_scores]
            if len(scores) != len(ids):
                raise GenerationFailed(f"log-probabilities of {len(scores) - 1} tokens of a prompt of {len(ids)} came")
            for token in map(ScoredToken, ids, echo.pieces, scores):
                self._add_token(token)
        self._told = len(echo.text)
        return echo.text

    def _show(self, ids: list[int]) -> str:
        if not self._one_by_one:
            self.completion_tokens += len(ids)
            return self._detokenizer.push(ids)
        text = ""
        for id_ in ids:
            token_text = self._detokenizer.push([id_])
            if self._has_scores:
                self._add_token(ScoredToken(id_, token_text, self.generation.scores[self.completion_tokens]))
            text += self._matcher.push(token_text)
            self.completion_tokens += 1
            if self._matcher.matched:
                self.finish_reason = "stop"
                break
        return text

    def _add_token(self, token: ScoredToken) -> None:
        self._tokens.append((self._told, token))
        self._told += len(token.text)

    def _begun_tokens(self) -> list[ScoredToken]:
        """Tokens whose text has begun to be given: not those of a stop string, nor those whose text is held back."""
        rest = self.finish_reason is not None and not self._matcher.matched
        tokens = []
        while self._tokens and (rest or self._tokens[0][0] < self._shown):
            tokens.append(self._tokens.popleft()[1])
        return tokens


class Patience(NamedTuple):
    """How long an answer is waited for, in seconds."""

    keep_alive: float  # until the client hears that it is still waited for
    first_token: float
    idle: float  # until the next token


class Answer:
    """The choices of one HTTP request, in the order in which their text arrives."""

    def __init__(
        self,
        choices: Sequence[Choice],
        choices_per_prompt: int,
        wake: asyncio.Event,
        patience: Patience,
        deadline: float,
        on_tokens: Callable[[int, int], None],
        on_sent: Callable[[float], None],
    ) -> None:
        """deadline: on the event loop's clock. `wake` is set by each generation that has news; `on_tokens` is told of every choice
        that got tokens, and how many; `on_sent`, whenever a delta has been used up, how many seconds its oldest token was here."""
        self.choices = choices
        self.deadline = deadline
        self._choices_per_prompt = choices_per_prompt
        self._wake = wake
        self._patience = patience
        self._on_tokens, self._on_sent = on_tokens, on_sent
        self._unfinished = len(choices)
        self._unsent: list[float] = []  # when the oldest tokens of the last deltas came
        self._quiet_since = 0.0
        self._tokens_at, self._has_tokens = asyncio.get_running_loop().time(), False  # when the last came, if any did
        self._timer: asyncio.TimerHandle | None = None

    @property
    def finished(self) -> bool:
        """All choices have ended."""
        return not self._unfinished

    @property
    def usage(self) -> Usage:
        """Prompts, each counted once, and the completions of all choices, as far as they have come."""
        firsts = [choice.generation for choice in self.choices[:: self._choices_per_prompt]]
        return Usage(
            prompt_tokens=sum(generation.prompt_tokens for generation in firsts),
            completion_tokens=sum(choice.completion_tokens for choice in self.choices),
            cached_tokens=sum(generation.cached_tokens for generation in firsts),
        )

    async def next(self) -> list[Delta]:
        """What comes next, of one choice or of several; nothing when nothing came for `patience.keep_alive`.

        Raises the RequestError that ended a generation, or TimedOut. Not to be called when all have finished.
        """
        self._sent()
        loop = asyncio.get_running_loop()
        self._quiet_since = loop.time()
        if self._timer is None:
            self._timer = loop.call_at(self._due, self._on_timer)
        while True:
            await self._wake.wait()
            self._wake.clear()
            now = loop.time()
            if now >= self.deadline:
                raise TimedOut("the request took too long")
            deltas = [delta for choice in self.choices if (delta := self._advance(choice, now))]
            if deltas:
                return deltas
            if now >= self._given_up_at:
                raise TimedOut(f"no token has come for {now - self._tokens_at:.0f} s")
            if now >= self._due:
                return []

    def close(self) -> None:
        """Cancels what has not finished."""
        self._sent()
        if self._timer is not None:
            self._timer.cancel()
        for choice in self.choices:
            choice.generation.close()

    def _advance(self, choice: Choice, now: float) -> Delta | None:
        before, arrived_at = choice.completion_tokens, choice.generation.arrived_at
        delta = choice.advance()
        if choice.completion_tokens > before:
            self._on_tokens(choice.index, choice.completion_tokens - before)
            self._tokens_at, self._has_tokens = now, True
        if delta is not None:
            self._unsent.append(arrived_at)
            self._unfinished -= delta.finish_reason is not None
        return delta

    def _sent(self) -> None:
        if self._unsent:
            now = time.monotonic()
            for arrived_at in self._unsent:
                self._on_sent(now - arrived_at)
            self._unsent.clear()

    @property
    def _due(self) -> float:
        """When the wait ends though nothing came."""
        return min(self._quiet_since + self._patience.keep_alive, self._given_up_at, self.deadline)

    @property
    def _given_up_at(self) -> float:
        """When nothing is waited for any more though the deadline is not here."""
        return self._tokens_at + (self._patience.idle if self._has_tokens else self._patience.first_token)

    def _on_timer(self) -> None:
        """One timer for the whole answer, which moves on when it rings too early: one for each wait would cost as much as a token."""
        loop = asyncio.get_running_loop()
        now, due = loop.time(), self._due
        if now >= due:
            self._wake.set()
            due = min(now + self._patience.keep_alive, max(self._given_up_at, now + MIN_TIMER_S), self.deadline)
        if now < self.deadline:
            self._timer = loop.call_at(due, self._on_timer)
