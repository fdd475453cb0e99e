"""Byte-level vocabularies, whose tokens stand for bytes whatever is beside them."""

import json
from typing import Any

from tokenizers import Tokenizer

BYTE_LEVEL = "ByteLevel"


class TokenBytes(dict[int, bytes]):
    """The bytes of each id of a tokenizer whose decoder joins bytes and does nothing else; kept once they were asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._alphabet = byte_alphabet()

    def __missing__(self, id_: int) -> bytes:
        token = self._tokenizer.id_to_token(id_)
        if token is None:  # beyond the tokenizer, where the model's vocabulary is padded: not kept, since there is no end of those
            return b""
        try:
            self[id_] = bytes([self._alphabet[character] for character in token])
        except KeyError:  # an added token with other characters stands for itself
            self[id_] = token.encode()
        return self[id_]


def decoder_kinds(tokenizer: Tokenizer) -> frozenset[str]:
    """The names of the parts of a tokenizer's decoder."""
    return frozenset(_kinds(json.loads(tokenizer.to_str())["decoder"]))


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: those that can be printed stand for themselves, the others follow from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return set().union(*map(_kinds, decoder["decoders"]))
    return {decoder["type"]}
