"""Single tokens as clients see them beside log-probabilities: the bytes they stand for, and a text for those."""

import json
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer

from services.gateway.text.byte_level import BYTE_LEVEL, byte_alphabet, decoder_kinds

SENTENCEPIECE_BLANK = "▁"


class TokenText(NamedTuple):
    text: str  # as decoded: ` Hello` with a blank; of a token that is part of a character, its bytes are spelt out
    data: bytes | None  # None of special tokens, which stand for no text
    text_json: str  # both as JSON, since up to 21 of them are written for each token of an answer
    data_json: str


class TokenTexts(dict[int, TokenText]):
    """Of one tokenizer, by id; kept once they were asked for, which is at most the vocabulary."""

    def __init__(self, tokenizer: Tokenizer, added: dict[int, AddedToken]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._added = added
        kinds = decoder_kinds(tokenizer)
        self._alphabet = byte_alphabet() if BYTE_LEVEL in kinds else None
        self._has_blanks = not kinds.isdisjoint(("Metaspace", "Replace"))

    def __missing__(self, id_: int) -> TokenText:
        text, data = self._find(id_)
        data_json = "null" if data is None else f"[{','.join(map(str, data))}]"
        self[id_] = TokenText(text, data, json.dumps(text), data_json)
        return self[id_]

    def _find(self, id_: int) -> tuple[str, bytes | None]:
        added = self._added.get(id_)
        if added is not None:
            return added.content, None if added.special else added.content.encode()
        token = self._tokenizer.id_to_token(id_)
        if token is None:  # beyond the tokenizer, where the model's vocabulary is padded
            return "", None
        data = self._bytes(id_, token)
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data

    def _bytes(self, id_: int, token: str) -> bytes:
        if self._alphabet is not None and all(character in self._alphabet for character in token):
            return bytes(self._alphabet[character] for character in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):  # SentencePiece's byte fallback
            return bytes([int(token[3:5], 16)])
        if self._has_blanks:
            return token.replace(SENTENCEPIECE_BLANK, " ").encode()
        return self._tokenizer.decode([id_], skip_special_tokens=False).encode()
