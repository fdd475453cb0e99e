from typing import Any

import pytest
import transformers
from transformers import PreTrainedTokenizerFast

from services.worker.weights.gguf_file import InvalidGGUF, UnsupportedGGUF
from services.worker.weights.gguf_import import convert_gguf
from tests.services.worker.weights.tiny_gguf import CHAT_TEMPLATE, MERGES, TOKENS, TYPES, tiny_llama, write_gguf

TEXTS = [
    "",
    " ",
    "hello hell he'LL we'll IT'S it's",
    "1234567 3.14 ²³ ½ ١٢٣ Ⅷ x1y22",
    "  two\n\n\n \t tabs \r\n and ends   ",
    "naïve cafe\u0301 東京 привет 🎉👩‍👩‍👧 a.b,c!?...--__ <|x|>",
    "def f(x):\n\treturn x  # ok\n\n",
]


@pytest.fixture
def converted(tmp_path):
    """Writes a GGUF file with `changes` and loads its tokenizer as a gateway does."""

    def convert(changes: dict[str, object]) -> Any:
        gguf = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), changes={f"tokenizer.{key}": value for key, value in changes.items()})
        convert_gguf(gguf, tmp_path / "model")
        return PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")

    return convert


def pieces(tokenizer: Any, text: str) -> list[str]:
    """The text's parts within which merging takes place."""
    return [text[start:end] for _, (start, end) in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    "name, expected",
    [
        ("gpt-2", ["I", "'", "LL", " pay", " 12345", "!", "\n\n", " it", "'s"]),
        ("smollm", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", "!", "\n\n", " it", "'s"]),
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "45", "!\n\n", " it", "'s"]),
        ("qwen2", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", "!\n\n", " it", "'s"]),
    ],
)
def test_text_is_split_as_the_pre_tokenizer_named_splits_it(converted, name, expected):
    assert pieces(converted({"ggml.pre": name}), "I'LL pay 12345!\n\n it's") == expected


@pytest.mark.parametrize("name, original", [("gpt-2", "GPT2Tokenizer"), ("qwen2", "Qwen2Tokenizer")])
def test_ids_are_those_of_the_original_tokenizer(converted, name, original):
    vocab = {token: token_id for token_id, token in enumerate(TOKENS)}
    expected = getattr(transformers, original)(vocab=vocab, merges=[tuple(merge.split()) for merge in MERGES])
    tokenizer = converted({"ggml.pre": name})
    for text in TEXTS:
        assert tokenizer.encode(text) == expected.encode(text)


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe"])  # qwen2 normalises: not every text comes back
def test_decoding_gives_back_the_text(converted, name):
    tokenizer = converted({"ggml.pre": name})
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    "changes, before, after",
    [
        ({"ggml.pre": "gpt-2"}, [], []),
        ({"ggml.pre": "llama-bpe"}, ["<start>"], []),
        ({"ggml.pre": "llama-bpe", "ggml.add_bos_token": False}, [], []),
        ({"ggml.pre": "smollm", "ggml.add_bos_token": True, "ggml.add_eos_token": True}, ["<start>"], ["<end>"]),
    ],
)
def test_bos_and_eos_are_added_where_the_file_asks_for_them(converted, changes, before, after):
    tokenizer = converted(changes)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("he")) == [*before, "he", *after]
    assert tokenizer.encode("he", add_special_tokens=False) == [TOKENS.index("he")]


def test_only_llama_3_takes_a_whole_word_that_no_merge_makes(converted):
    assert converted({"ggml.pre": "llama-bpe"}).tokenize("whole") == ["whole"]


def test_gpt2_needs_merges_to_make_a_word(converted):
    assert converted({"ggml.pre": "gpt-2"}).tokenize("whole") == ["w", "h", "o", "l", "e"]


def test_control_tokens_are_special_and_user_defined_ones_are_text(converted):
    tokenizer = converted({})
    ids = tokenizer.encode("<start>hell<turn><tool><end>")
    assert ids == [TOKENS.index(token) for token in ("<start>", "hell", "<turn>", "<tool>", "<end>")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hell<tool>"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token) == ("<start>", "<end>", "<none>", "<none>")
    assert tokenizer.model_max_length == 128


def test_the_chat_template_is_kept_to_the_byte(converted, tmp_path):
    text = converted({}).apply_chat_template([{"role": "user", "content": "hell"}], tokenize=False)
    assert text == "<start>user\nhell<end>\n"
    assert (tmp_path / "model" / "chat_template.jinja").read_bytes() == CHAT_TEMPLATE.encode()


def test_a_file_without_chat_template_has_none(converted, tmp_path):
    assert converted({"chat_template": None}).chat_template is None
    assert not (tmp_path / "model" / "chat_template.jinja").exists()


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"ggml.model": "llama"}, UnsupportedGGUF, "tokenizer model 'llama'"),
        ({"ggml.pre": "tekken"}, UnsupportedGGUF, "pre-tokenizer 'tekken' is not known, only gpt-2, llama-bpe, qwen2, smollm"),
        ({"ggml.pre": "default"}, UnsupportedGGUF, "pre-tokenizer 'default' is not known"),
        ({"ggml.pre": None}, UnsupportedGGUF, "pre-tokenizer None is not known"),
        ({"ggml.tokens": [*TOKENS[:-1], "he"]}, InvalidGGUF, "occur twice"),
        ({"ggml.tokens": TOKENS[:-1]}, InvalidGGUF, "rows of token_embd.weight"),
        ({"ggml.token_type": [int(kind) for kind in TYPES[1:]]}, InvalidGGUF, "token types"),
        ({"ggml.merges": ["h x", *MERGES]}, InvalidGGUF, "merge 'h x'"),
        ({"ggml.merges": None}, InvalidGGUF, "tokenizer.ggml.merges is missing"),
        ({"ggml.merges": [1, 2]}, InvalidGGUF, "tokenizer.ggml.merges must be an array of str"),
        ({"ggml.eos_token_id": len(TOKENS)}, InvalidGGUF, "tokenizer.ggml.eos_token_id is"),
        ({"ggml.add_bos_token": True, "ggml.bos_token_id": None}, InvalidGGUF, "tokenizer.ggml.bos_token_id is missing"),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_refused(converted, tmp_path, changes, error, words):
    with pytest.raises(error, match=words) as raised:
        converted(changes)
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
