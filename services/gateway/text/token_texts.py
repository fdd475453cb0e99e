"""Single tokens as clients see them beside log-probabilities: the bytes they stand for, and a text for those."""

from tokenizers import AddedToken, Tokenizer

from services.gateway.text.byte_level import BYTE_LEVEL, byte_alphabet, decoder_kinds

SENTENCEPIECE_BLANK = "▁"


class TokenTexts:
    """Of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, added: dict[int, AddedToken]) -> None:
        self._tokenizer = tokenizer
        self._added = added
        kinds = decoder_kinds(tokenizer)
        self._alphabet = byte_alphabet() if BYTE_LEVEL in kinds else None
        self._has_blanks = not kinds.isdisjoint(("Metaspace", "Replace"))
        self._known: dict[int, tuple[str, bytes | None]] = {}  # at most the vocabulary

    def text(self, id_: int) -> str:
        """As decoded: ` Hello` with a blank. Of a token that is part of a character, its bytes are spelt out."""
        return self._of(id_)[0]

    def data(self, id_: int) -> bytes | None:
        """None for special tokens, which stand for no text."""
        return self._of(id_)[1]

    def _of(self, id_: int) -> tuple[str, bytes | None]:
        if id_ not in self._known:
            self._known[id_] = self._find(id_)
        return self._known[id_]

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
