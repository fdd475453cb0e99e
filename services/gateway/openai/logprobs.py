"""Log-probabilities as each endpoint writes them."""

from collections.abc import Sequence
from typing import Any

from services.gateway.answer import ScoredToken
from services.gateway.text.token_texts import TokenTexts

LEAST = -9999.0  # JSON has no infinity, and no NaN: `max(LEAST, nan)` is LEAST, the other way round it is not


def chat_logprobs(tokens: Sequence[ScoredToken], texts: TokenTexts) -> dict[str, Any]:
    """Of a choice or a chunk: each token with its bytes, and the likeliest ones in its place."""
    content = []
    for token in tokens:
        if token.score is None:
            raise ValueError("only a prompt has a token without a log-probability")
        top = [_entry(id_, logprob, texts) for id_, logprob in token.score.top]
        content.append({**_entry(token.id, token.score.logprob, texts), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(id_: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    data = texts.data(id_)
    return {"token": texts.text(id_), "logprob": max(LEAST, logprob), "bytes": None if data is None else list(data)}


class LegacyLogprobs:
    """Of one choice: four parallel lists, whose offsets count from the beginning of its text."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offset = 0  # characters

    def of(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """Those of the next tokens. The likeliest ones always hold the token itself; nothing is known of a prompt's first token."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [None if token.score is None else max(LEAST, token.score.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: ScoredToken) -> dict[str, float] | None:
        if token.score is None:
            return None
        top = {self._texts.text(id_): max(LEAST, logprob) for id_, logprob in token.score.top}
        return {**top, self._texts.text(token.id): max(LEAST, token.score.logprob)}
