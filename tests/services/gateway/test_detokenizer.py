"""Token ids to text, incrementally: whole characters, equal to decoding all at once, at constant cost."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.gateway.text.detokenizer import REPLACEMENT, ByteDetokenizer, ContextDetokenizer, Detokenizer
from services.gateway.text.tokenizer import TextTokenizer
from tests.tiny import VOCAB_SIZE


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> TextTokenizer:
    return TextTokenizer(tokenizer_folder, max_length=256)


@pytest.fixture(scope="module", params=["bytes", "context"])
def new_detokenizer(tokenizer: TextTokenizer, request: pytest.FixtureRequest) -> Callable[[], Detokenizer]:
    """Of a byte-level tokenizer: the one for those, which it has, and the one for every tokenizer."""
    if request.param == "bytes":
        return tokenizer.detokenizer
    hidden = {id_ for id_, token in tokenizer.transformers.added_tokens_decoder.items() if token.special}
    return lambda: ContextDetokenizer(tokenizer.transformers.backend_tokenizer, lambda id_: id_ < VOCAB_SIZE and id_ not in hidden)


def byte_ids(tokenizer: TextTokenizer, data: bytes) -> list[int]:
    """One token a byte."""
    alphabet = _bytes_to_characters()
    return [tokenizer.transformers.get_vocab()[alphabet[byte]] for byte in data]


def _bytes_to_characters() -> dict[int, str]:
    """GPT-2's printable stand-ins for bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in kept)
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def pieces(detokenizer: Detokenizer, ids: list[int], step: int = 1) -> list[str]:
    given = [detokenizer.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*given, detokenizer.flush()]


def test_byte_level_vocabularies_are_detokenised_as_bytes(tokenizer: TextTokenizer) -> None:
    assert isinstance(tokenizer.detokenizer(), ByteDetokenizer)


def test_tok_01_characters_over_several_tokens_come_whole(tokenizer: TextTokenizer, new_detokenizer: Callable[[], Detokenizer]) -> None:
    text = "a😀é世"
    got = pieces(new_detokenizer(), byte_ids(tokenizer, text.encode()))
    assert [piece for piece in got if piece] == list(text)


def test_an_incomplete_character_is_shown_at_the_end_only(tokenizer: TextTokenizer, new_detokenizer: Callable[[], Detokenizer]) -> None:
    got = pieces(new_detokenizer(), byte_ids(tokenizer, "a😀".encode()[:-1]))
    assert got[0] == "a"
    assert got[-1] == REPLACEMENT
    assert not any(got[1:-1])


@settings(deadline=None)
@given(data=st.data(), step=st.integers(1, 5))
def test_pieces_make_the_whole_decoding(
    tokenizer: TextTokenizer, new_detokenizer: Callable[[], Detokenizer], data: st.DataObject, step: int
) -> None:
    ids = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=80))
    expected = tokenizer.transformers.backend_tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces(new_detokenizer(), ids, step)) == expected


@settings(deadline=None)
@given(noise=st.lists(st.sampled_from(bytes.fromhex("80 e4 b8 96 f0 9f 61 ed a0 c0 e0 f4 90 f8 ff")), max_size=80))
def test_broken_bytes_make_the_whole_decoding(
    tokenizer: TextTokenizer, new_detokenizer: Callable[[], Detokenizer], noise: list[int]
) -> None:
    ids = byte_ids(tokenizer, bytes(noise))
    expected = tokenizer.transformers.backend_tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces(new_detokenizer(), ids)) == expected


def test_tok_09_cost_does_not_grow(tokenizer: TextTokenizer, new_detokenizer: Callable[[], Detokenizer]) -> None:
    def cost(detokenizer: Detokenizer, ids: list[int]) -> float:
        begun = time.thread_time()
        for each in ids:
            detokenizer.push([each])
        return time.thread_time() - begun

    ids = tokenizer.encode_prompt("hello, world ")
    for endless in (ids, byte_ids(tokenizer, b"\x80"), [1], [VOCAB_SIZE + 5]):  # text, broken bytes, special and unknown ids
        detokenizer = new_detokenizer()
        slices = [list(itertools.islice(itertools.cycle(endless), 1000)) for _ in range(8)]
        costs = [cost(detokenizer, each) for each in slices]
        assert min(costs[5:]) <= 2 * max(costs[:3])


def test_tok_10_special_tokens_are_hidden(tokenizer: TextTokenizer, new_detokenizer: Callable[[], Detokenizer]) -> None:
    hello, world = (tokenizer.encode_prompt(text) for text in ("hello", "world"))
    assert "".join(pieces(new_detokenizer(), [*hello, 1, *world, 2])) == "helloworld"


def test_tok_04_blanks_of_metaspace_pieces() -> None:
    vocabulary = [("<unk>", 0.0), *((piece, -1.0) for piece in ("▁Hello", "▁world", "▁two", "▁"))]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    ids = [1, 2, 4, 3]
    assert tokenizer.decode(ids) == "Hello world  two"
    assert "".join(pieces(ContextDetokenizer(tokenizer, lambda id_: True), ids)) == "Hello world  two"


def test_characters_in_byte_fallback_tokens_come_whole() -> None:
    pieces_ = ["<unk>", "▁a", *(f"<0x{byte:02X}>" for byte in "世".encode()), "▁b"]
    tokenizer = Tokenizer(models.BPE({piece: id_ for id_, piece in enumerate(pieces_)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    got = pieces(ContextDetokenizer(tokenizer, lambda id_: True), [1, 2, 3, 4, 5])
    assert [piece for piece in got if piece] == ["a", "世", " b"]
