"""One of the texts of an answer, as it comes: what is new of it, a bounded part at a time."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from services.gateway.errors import GenerationFailed
from services.gateway.generation import Generation
from services.gateway.scores import Score
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stops import StopMatcher

FinishReason = Literal["stop", "length"]
TURN_TOKENS = 256  # that are looked at one by one before others get their turn: some 5 ms with 20 log-probabilities each


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


@dataclass
class Echo:
    """A prompt that its choices repeat."""

    text: str
    ids: Sequence[int]
    pieces: Sequence[str]  # the text of each token
    scored_by: Generation | None = None  # of its choices the one that brings the log-probabilities, where they are asked for

    @property
    def is_known(self) -> bool:
        """All that is asked for has come: log-probabilities come before anything else of their choice."""
        return self.scored_by is None or bool(self.scored_by.ids) or self.scored_by.ending is not None

    def tokens(self, start: int, most: int) -> list[ScoredToken]:
        """The prompt's tokens from `start` on, with their log-probabilities; none where those are not asked for.

        Raises GenerationFailed when they have not come.
        """
        if self.scored_by is None:
            return []
        scores = self.scored_by.prompt_scores
        if len(scores) != len(self.ids) - 1:
            raise GenerationFailed(f"log-probabilities of {len(scores)} tokens of a prompt of {len(self.ids)} came")
        places = range(start, min(start + most, len(self.ids)))
        return [ScoredToken(self.ids[place], self.pieces[place], scores[place - 1] if place else None) for place in places]


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
        self.looked_at, self.is_behind = 0, False  # by the last `advance`: tokens one by one, and whether it has left some for the next
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._min_tokens = generation.submit.min_tokens  # that no stop string ends, as no id does
        self._terminal_ids = terminal_ids
        self._ids: list[int] = []  # taken and not shown: what the last turn has left, or a last id that is a terminal one
        self._echo = echo
        self._repeated = 0  # tokens of the prompt
        self._has_scores = generation.submit.HasField("logprobs")
        self._one_by_one = bool(stops) or self._has_scores  # to know which token completes a stop string, and what text is whose
        self._logprob = 0.0  # of all tokens of the completion
        self._tokens: deque[tuple[int, ScoredToken]] = deque()  # those not given yet, with the place in the text where each begins
        self._told, self._shown = 0, 0  # characters of all tokens, and of the text that was given

    @property
    def mean_logprob(self) -> float:
        """Of the tokens of the completion, where the request asks for log-probabilities."""
        return self._logprob / max(self.completion_tokens, 1)

    def advance(self, most: int = TURN_TOKENS) -> Delta | None:
        """What is new, if anything, of at most so many tokens that are looked at one by one. Raises the RequestError that ended the
        generation."""
        self.looked_at, self.is_behind = 0, False
        if self.finish_reason is not None:
            return None
        ids = self._ids + self.generation.take()
        ending = self.generation.ending
        self._ids = []
        text = ""
        if self._echo is not None:
            text = self._repeat_prompt(most) if self._echo.is_known and (ids or ending) else ""
            if self._echo is not None:  # not to the end
                self._ids = ids
                return self._new(text)
        if self._one_by_one:
            room = most - self.looked_at
            ids, self._ids = ids[:room], ids[room:]
            self.looked_at += len(ids)
            self.is_behind = bool(self._ids)
        if not self.is_behind and ids and (ending.stopped if ending else ids[-1] in self._terminal_ids):
            self._ids = [ids.pop()]
        text += self._show(ids)
        if ending is not None and not self.is_behind and self.finish_reason is None:
            text += self._finish(stopped=ending.stopped)
        if self.finish_reason is not None:
            self.is_behind = False
            self.generation.close(self.completion_tokens)
        return self._new(text)

    def _new(self, text: str) -> Delta | None:
        self._shown += len(text)
        if not text and self.finish_reason is None:
            return None
        return Delta(self.index, text, self.finish_reason, self._begun_tokens() if self._tokens else ())

    def _finish(self, *, stopped: bool) -> str:
        """The last text. Of ids only one that ended the generation is left, which shows none."""
        for _ in self._ids:
            self._count_token()
        text = self._matcher.push(self._detokenizer.flush())
        self.finish_reason = "stop" if stopped or self._matcher.matched else "length"
        return text + self._matcher.flush()

    def _repeat_prompt(self, most: int) -> str:
        """The next part of the prompt, which is the whole where its log-probabilities are not asked for; `_echo` is None at its end."""
        echo = self._echo
        assert echo is not None
        tokens = echo.tokens(self._repeated, most)
        for token in tokens:
            self._add_token(token)
        self.looked_at = len(tokens)
        self._repeated += len(tokens)
        if tokens and self._repeated < len(echo.ids):
            self.is_behind = True
            return echo.text[self._shown : self._told]
        self._told, self._echo = len(echo.text), None
        return echo.text[self._shown :]

    def _show(self, ids: list[int]) -> str:
        if not self._one_by_one:
            self.completion_tokens += len(ids)
            return self._detokenizer.push(ids)
        text = ""
        for id_ in ids:
            token_text = self._detokenizer.push([id_])
            if self._has_scores:
                self._add_token(ScoredToken(id_, token_text, self.generation.scores[self.completion_tokens]))
            text += self._matcher.push(token_text, may_end=self.completion_tokens >= self._min_tokens)
            self._count_token()
            if self._matcher.matched:
                self.finish_reason = "stop"
                break
        return text

    def _count_token(self) -> None:
        if self._has_scores:
            self._logprob += self.generation.scores[self.completion_tokens].logprob
        self.completion_tokens += 1

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
