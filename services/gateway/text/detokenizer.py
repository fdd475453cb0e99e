"""Token ids to text, a few at a time: never half a character, at a cost that does not grow with the answer."""

import codecs
from collections.abc import Callable, Mapping
from typing import Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # what decoding puts for bytes that are no whole character
MAX_INCOMPLETE_TOKENS = 16  # more tokens than any character has bytes: what is still broken then is broken for good
MAX_CHARACTER_BYTES = 4  # so the incomplete character at the end lies in the last 3 tokens


class Detokenizer(Protocol):
    """Text of one answer. The pieces that it gives, joined, are the decoding of all ids that are to be seen."""

    def push(self, ids: list[int]) -> str:
        """The text that is certain with these ids; "" while a character is incomplete."""

    def flush(self) -> str:
        """The rest, at the end of the answer, as it is."""


class ByteDetokenizer:
    """For byte-level vocabularies. It runs once a token: asking the tokenizer costs six times as much."""

    def __init__(self, token_bytes: Mapping[int, bytes], hidden: frozenset[int]) -> None:
        """hidden: ids that show no text."""
        self._bytes, self._hidden = token_bytes, hidden
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, ids: list[int]) -> str:
        """The text that is certain with these ids; "" while a character is incomplete."""
        return self._decode(b"".join([self._bytes[id_] for id_ in ids if id_ not in self._hidden]))

    def flush(self) -> str:
        """The rest, at the end of the answer, as it is."""
        return self._decode(b"", True)


class ContextDetokenizer:
    """For every tokenizer.

    Decoding looks at neighbours (a leading blank, the bytes of a character), so each new piece is decoded after the ids of the piece
    before, its context; the text that both give is cut off again.
    """

    def __init__(self, tokenizer: Tokenizer, is_visible: Callable[[int], bool]) -> None:
        self._tokenizer = tokenizer
        self._is_visible = is_visible
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, ids: list[int]) -> str:
        """The text that is certain with these ids; "" while a character is incomplete."""
        self._pending += filter(self._is_visible, ids)
        if not self._pending:
            return ""
        text = self._decode(self._context + self._pending)
        if text == self._context_text:  # a blank that shows only before the next word: it must not become the context alone
            return ""
        if not text.endswith(REPLACEMENT):
            return self._give(len(self._pending), text)
        if len(self._pending) > MAX_INCOMPLETE_TOKENS:
            return self._give_all_but_the_last(text)
        return ""

    def flush(self) -> str:
        """The rest, at the end of the answer, as it is."""
        return self._give(len(self._pending), self._decode(self._context + self._pending))

    def _give_all_but_the_last(self, text: str) -> str:
        for kept in range(MAX_CHARACTER_BYTES, 0, -1):
            part = self._decode(self._context + self._pending[:-kept])
            if text.startswith(part):  # else the cut goes through a character
                return self._give(len(self._pending) - kept, part)
        return ""

    def _give(self, count: int, text: str) -> str:
        """Takes `count` pending ids as done; `text` is the decoding of the context and of them."""
        piece = text[len(self._context_text) :]
        if count:
            self._context, self._pending = self._pending[:count], self._pending[count:]
            self._context_text = self._decode(self._context)
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
