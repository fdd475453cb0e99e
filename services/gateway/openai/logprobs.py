"""Log-probabilities as each endpoint writes them: JSON in pieces, since an answer may hold two million."""

import itertools
from collections.abc import Iterator, Sequence

from services.gateway.choice import TURN_TOKENS, ScoredToken
from services.gateway.openai.sending import listed, to_json
from services.gateway.text.token_texts import TokenText, TokenTexts

LEAST = -9999.0  # JSON has no infinity, and no NaN: `max(LEAST, nan)` is LEAST, the other way round it is not


def chat_logprobs(tokens: Sequence[ScoredToken], texts: TokenTexts) -> Iterator[str]:
    """Of a choice or a chunk: each token with its bytes, and the likeliest ones in its place."""
    yield '{"content":'
    yield from listed((_chosen(token, texts) for token in tokens), TURN_TOKENS)
    yield ',"refusal":null}'


def _chosen(token: ScoredToken, texts: TokenTexts) -> str:
    if token.score is None:
        raise ValueError("only a prompt has a token without a log-probability")
    top = ",".join([_entry(texts[id_], logprob) + "}" for id_, logprob in token.score.top])
    return f'{_entry(texts[token.id], token.score.logprob)},"top_logprobs":[{top}]}}'


def _entry(token: TokenText, logprob: float) -> str:
    """Without its closing brace."""
    return f'{{"token":{token.text_json},"logprob":{_number(logprob)},"bytes":{token.data_json}'


class LegacyLogprobs:
    """Of one choice: four parallel lists, whose offsets count from the beginning of its text."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offset = 0  # characters

    def of(self, tokens: Sequence[ScoredToken]) -> Iterator[str]:
        """Those of the next tokens. The likeliest ones always hold the token itself; nothing is known of a prompt's first token."""
        offsets = list(itertools.accumulate((len(token.text) for token in tokens), initial=self._offset))
        self._offset = offsets.pop()
        yield '{"tokens":'
        yield from listed((to_json(token.text) for token in tokens), TURN_TOKENS)
        yield ',"token_logprobs":'
        yield from listed(("null" if token.score is None else _number(token.score.logprob) for token in tokens), TURN_TOKENS)
        yield ',"top_logprobs":'
        yield from listed(map(self._top, tokens), TURN_TOKENS)
        yield ',"text_offset":'
        yield from listed(map(str, offsets), TURN_TOKENS)
        yield "}"

    def _top(self, token: ScoredToken) -> str:
        if token.score is None:
            return "null"
        top: dict[str, float] = {}
        for id_, logprob in token.score.top:
            top.setdefault(self._texts[id_].text_json, logprob)  # of several with one text, the likeliest
        top[self._texts[token.id].text_json] = token.score.logprob
        return "{" + ",".join([f"{text}:{_number(logprob)}" for text, logprob in top.items()]) + "}"


def _number(logprob: float) -> str:
    return repr(min(max(LEAST, logprob), 0.0))
