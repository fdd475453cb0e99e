"""Token ids to text, incrementally: whole characters, equal to decoding all at once, at constant cost."""

import itertools
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.gateway.text.detokenizer import REPLACEMENT, Detokenizer
from services.gateway.text.tokenizer import TextTokenizer
from tests.tiny import VOCAB_SIZE


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> TextTokenizer:
    return TextTokenizer(tokenizer_folder, max_length=256)


def byte_ids(tokenizer: TextTokenizer, data: bytes) -> list[int]:
    """One token a byte."""
    alphabet = _bytes_to_characters()
    return [tokenizer.transformers.convert_tokens_to_ids(alphabet[byte]) for byte in data]


def _bytes_to_characters() -> dict[int, str]:
    """GPT-2's printable stand-ins for bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in kept)
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + index) for index, byte in enumerate(others)}


def pieces(detokenizer: Detokenizer, ids: list[int], step: int = 1) -> list[str]:
    given = [detokenizer.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*given, detokenizer.flush()]


def test_tok_01_characters_over_several_tokens_come_whole(tokenizer: TextTokenizer) -> None:
    text = "a😀é世"
    got = pieces(tokenizer.detokenizer(), byte_ids(tokenizer, text.encode()))
    assert [piece for piece in got if piece] == list(text)


def test_an_incomplete_character_is_shown_at_the_end_only(tokenizer: TextTokenizer) -> None:
    got = pieces(tokenizer.detokenizer(), byte_ids(tokenizer, "a😀".encode()[:-1]))
    assert got[0] == "a"
    assert got[-1] == REPLACEMENT
    assert not any(got[1:-1])


@settings(deadline=None)
@given(data=st.data(), step=st.integers(1, 5))
def test_pieces_make_the_whole_decoding(tokenizer: TextTokenizer, data: st.DataObject, step: int) -> None:
    ids = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=80))
    expected = tokenizer.transformers.backend_tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces(tokenizer.detokenizer(), ids, step)) == expected


@settings(deadline=None)
@given(noise=st.lists(st.sampled_from([0x80, 0xE4, 0xB8, 0x96, 0xF0, 0x9F, 0x61]), max_size=80))
def test_broken_bytes_make_the_whole_decoding(tokenizer: TextTokenizer, noise: list[int]) -> None:
    ids = byte_ids(tokenizer, bytes(noise))
    expected = tokenizer.transformers.backend_tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces(tokenizer.detokenizer(), ids)) == expected


def test_tok_09_cost_does_not_grow(tokenizer: TextTokenizer) -> None:
    def cost(detokenizer: Detokenizer, ids: list[int]) -> float:
        begun = time.thread_time()
        for each in ids:
            detokenizer.push([each])
        return time.thread_time() - begun

    ids = tokenizer.encode_prompt("hello, world ")
    for endless in (ids, byte_ids(tokenizer, b"\x80"), [1], [VOCAB_SIZE + 5]):  # text, broken bytes, special and unknown ids
        detokenizer = tokenizer.detokenizer()
        slices = [list(itertools.islice(itertools.cycle(endless), 1000)) for _ in range(8)]
        costs = [cost(detokenizer, each) for each in slices]
        assert min(costs[5:]) <= 2 * max(costs[:3])


def test_tok_10_special_tokens_are_hidden(tokenizer: TextTokenizer) -> None:
    hello, world = (tokenizer.encode_prompt(text) for text in ("hello", "world"))
    assert "".join(pieces(tokenizer.detokenizer(), [*hello, 1, *world, 2])) == "helloworld"


def test_tok_04_blanks_of_metaspace_pieces() -> None:
    vocabulary = [("<unk>", 0.0), *((piece, -1.0) for piece in ("▁Hello", "▁world", "▁two", "▁"))]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    ids = [1, 2, 4, 3]
    assert tokenizer.decode(ids) == "Hello world  two"
    assert "".join(pieces(Detokenizer(tokenizer, lambda id_: True), ids)) == "Hello world  two"


def test_characters_in_byte_fallback_tokens_come_whole() -> None:
    pieces_ = ["<unk>", "▁a", *(f"<0x{byte:02X}>" for byte in "世".encode()), "▁b"]
    tokenizer = Tokenizer(models.BPE({piece: id_ for id_, piece in enumerate(pieces_)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    got = pieces(Detokenizer(tokenizer, lambda id_: True), [1, 2, 3, 4, 5])
    assert [piece for piece in got if piece] == ["a", "世", " b"]
