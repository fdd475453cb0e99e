"""The answer to one HTTP request: the text of its generations, as it comes."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.gateway.choice import TURN_TOKENS, Choice, Delta
from services.gateway.errors import TimedOut

MIN_TIMER_S = 0.01


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


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
        self._is_behind = False  # the last turn has left tokens for the next
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
            await (asyncio.sleep(0) if self._is_behind else self._wake.wait())
            self._wake.clear()
            now = loop.time()
            if now >= self.deadline:
                raise TimedOut("the request took too long")
            deltas = self._turn(now)
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

    def _turn(self, now: float) -> list[Delta]:
        """What all choices have to tell, as far as one turn of the event loop goes."""
        deltas, room, self._is_behind = [], TURN_TOKENS, False
        for choice in self.choices:
            if room <= 0:
                self._is_behind = True
                break
            delta = self._advance(choice, now, room)
            if delta is not None:
                deltas.append(delta)
            room -= choice.looked_at
            self._is_behind = self._is_behind or choice.is_behind
        return deltas

    def _advance(self, choice: Choice, now: float, most: int) -> Delta | None:
        before, arrived_at = choice.completion_tokens, choice.generation.arrived_at
        delta = choice.advance(most)
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
