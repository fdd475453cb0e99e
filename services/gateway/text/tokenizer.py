"""Text to token ids and back, with the model's own tokenizer files.

What a user writes never becomes a control token: a chat template is rendered with marks around every control token that a user typed, and
those are encoded by a second tokenizer that does not know control tokens. Without any, the whole prompt is encoded at once, as
`transformers` does. `transformers` has such a guard too (`sanitize_control_tokens`), but it switches the one shared tokenizer back and
forth, which is unsafe between threads, and drops two characters from the text.
"""

import itertools
import json
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from services.gateway.errors import InvalidRequest
from services.gateway.text.byte_level import BYTE_LEVEL, TokenBytes, decoder_kinds
from services.gateway.text.detokenizer import ByteDetokenizer, ContextDetokenizer, Detokenizer
from services.gateway.text.token_texts import TokenTexts
from shared.tokenizer import load_tokenizer

MARK_DIGITS = 24  # drawn anew for each request, so that no user can guess a mark


class Marks(NamedTuple):
    """What stands before and after a control token that a user typed: digits, which pass unchanged whatever a template does to text
    (strip, change case, write as JSON or as a Python literal) unless that breaks the control token too.
    """

    before: str
    after: str

    @classmethod
    def draw(cls) -> "Marks":
        """New random marks."""
        before, after = (str(secrets.randbelow(9 * 10 ** (MARK_DIGITS - 1)) + 10 ** (MARK_DIGITS - 1)) for _ in range(2))
        return cls(before, after)


class TextTokenizer:
    """The tokenizer of one model. Encoding takes a thread's time, not the event loop's; all methods may be called from any thread."""

    def __init__(self, folder: Path, max_length: int) -> None:
        """Reads the tokenizer's files; prompts are bounded by `max_length` tokens. Raises ConfigError when the files are unusable."""
        self.transformers = load_tokenizer(folder)
        self._tokenizer: Tokenizer = self.transformers.backend_tokenizer
        added = self.transformers.added_tokens_decoder
        template = self.chat_template or ""
        # An added token that is not special is a control token if the template writes it, as with <tool_call>.
        control = {str(each): id_ for id_, each in added.items() if each.special or (str(each) in template and not str(each).isspace())}
        longest_first = sorted(filter(None, control), key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"  # which matches nothing
        self._control, self._control_at_end = re.compile(pattern), re.compile(f"(?:{pattern})\\Z")
        self._control_ids = frozenset(control.values())
        self._hidden_ids = frozenset(id_ for id_, each in added.items() if each.special)
        self.token_texts = TokenTexts(self._tokenizer, added)
        self._token_bytes = TokenBytes(self._tokenizer) if decoder_kinds(self._tokenizer) == {BYTE_LEVEL} else None
        self._prefix_length = len(self._tokenizer.encode("", add_special_tokens=True).ids)  # BOS, where it is put before a prompt
        self.special_ids = {str(each): id_ for id_, each in added.items() if each.special}
        self._plain = _without_added_tokens(self._tokenizer, control)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.known_ids = max(vocabulary.values()) + 1  # ids below may be tokens; models often have more, as padding
        self._max_bytes = max_length * max(len(token.encode()) for token in vocabulary)

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the default template, None if the model has none."""
        template = self.transformers.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return template or None

    def encode_prompt(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a plain prompt, with what the tokenizer adds at the ends (BOS, where it does), once. Raises InvalidRequest."""
        self.check_size(text, "prompt")
        return _ids(self._tokenizer, text, add_special_tokens)

    def decode(self, ids: list[int]) -> str:
        """The text of ids, control tokens too. As a batch of one, for the reason that `_ids` has."""
        known = [id_ for id_ in ids if id_ < self.known_ids]
        return str(self._tokenizer.decode_batch([known], skip_special_tokens=False)[0])

    def encode_chat(self, rendered: str, marks: Marks) -> list[int]:
        """Ids of a rendered chat, whose template wrote all control tokens that are not between marks."""
        ids: list[int] = []
        for piece, as_text in self._pieces(rendered, marks):
            encode = self._encode_as_text if as_text else self._encode
            ids += encode(piece, continues=bool(ids))
        return ids

    def prompt_pieces(self, ids: list[int], is_text: bool) -> list[str]:
        """The text of each token of a prompt; none of what `encode_prompt` has put before a text."""
        detokenizer = self._detokenizer(frozenset())
        hidden = self._prefix_length if is_text else 0
        pieces = [""] * hidden + [detokenizer.push([id_]) for id_ in ids[hidden:]]
        return [*pieces[:-1], pieces[-1] + detokenizer.flush()]

    def without_marks(self, rendered: str, marks: Marks) -> str:
        """A rendered chat as it would be read."""
        return "".join(piece for piece, _ in self._pieces(rendered, marks))

    def mark(self, value: Any, marks: Marks) -> Any:
        """`value`, of JSON types, with marks around every control token in its strings."""
        if isinstance(value, str):
            return self._control.sub(lambda match: f"{marks.before}{match[0]}{marks.after}", value)
        if isinstance(value, dict):
            return {self.mark(key, marks): self.mark(each, marks) for key, each in value.items()}
        if isinstance(value, list):
            return [self.mark(each, marks) for each in value]
        return value

    def check_size(self, text: str, param: str) -> None:
        """Raises InvalidRequest for a text that would not fit even if every token were the longest one."""
        size = len(text.encode())
        if size > self._max_bytes:
            raise InvalidRequest(f"a prompt of {size} bytes is longer than this model's context", param, "context_length_exceeded")

    def detokenizer(self, shown: Iterable[str] = ()) -> Detokenizer:
        """A new one, for one answer, which hides all special tokens but those that are to be shown."""
        return self._detokenizer(self._hidden_ids.difference(map(self._tokenizer.token_to_id, shown)))

    def _detokenizer(self, hidden: frozenset[int]) -> Detokenizer:
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes, hidden)
        return ContextDetokenizer(self._tokenizer, lambda id_: id_ < self.known_ids and id_ not in hidden)

    def _pieces(self, rendered: str, marks: Marks) -> Iterator[tuple[str, bool]]:
        """The rendered chat without its marks, in pieces; True for a control token that is plain text.

        A template that cuts text may leave one mark of two, which is enough, or a mark without its token, which means nothing.
        """
        left = ""
        parts = re.split(f"({marks.before}|{marks.after})", rendered)
        for text, right in itertools.zip_longest(parts[::2], parts[1::2], fillvalue=""):
            if left == marks.before and (match := self._control.match(text)):
                yield match[0], True
                yield text[match.end() :], False
            elif right == marks.after and (match := self._control_at_end.search(text)):
                yield text[: match.start()], False
                yield match[0], True
            else:
                yield text, False
            left = right

    def _encode(self, text: str, continues: bool) -> list[int]:
        return _encode_piece(self._tokenizer, text, continues)

    def _encode_as_text(self, text: str, continues: bool) -> list[int]:
        """Ids without any control token. A vocabulary may hold one as a piece that its model finds in plain text: then by characters."""
        ids = _encode_piece(self._plain, text, continues)
        if self._control_ids.isdisjoint(ids):
            return ids
        characters = [_encode_piece(self._plain, character, continues or index > 0) for index, character in enumerate(text)]
        return [id_ for ids in characters for id_ in ids]


def _encode_piece(tokenizer: Tokenizer, text: str, continues: bool) -> list[int]:
    """Ids of a piece of a prompt. Where it continues others: encoded after a line break, so that SentencePiece adds no blank."""
    if not text:
        return []
    ids = _ids(tokenizer, f"\n{text}" if continues else text)
    if not continues:
        return ids
    newline = _ids(tokenizer, "\n")
    if ids[: len(newline)] == newline:
        return ids[len(newline) :]
    return _ids(tokenizer, text)


def _ids(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """Ids of a text. As a batch of one: `encode` would hold the interpreter's lock, and with it the event loop, all the while."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _without_added_tokens(tokenizer: Tokenizer, contents: dict[str, int]) -> Tokenizer:
    """A copy that encodes the given added tokens as any text."""
    definition = json.loads(tokenizer.to_str())
    definition["added_tokens"] = [each for each in definition["added_tokens"] if each["content"] not in contents]
    definition["post_processor"] = None
    return Tokenizer.from_str(json.dumps(definition))
