"""The tokenizer inside a GGUF file, as the files that `PreTrainedTokenizerFast.from_pretrained` reads.

GGUF holds byte-level BPE as tokens, merges and the *name* of a pre-tokenizer (`tokenizer.ggml.pre`). The name stands for
the splitting rules of some published tokenizer, which must be rebuilt exactly: with other rules the ids differ in places
and the model only gets worse, silently. So a name that is not in the table is refused. That includes `default`, which
a converter writes when it does not know the tokenizer.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from services.worker.weights.gguf_file import InvalidGGUF, Metadata, UnsupportedGGUF


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    """The rules that Llama 3 and Qwen2 share but for the digits of a number that make one piece."""
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


class Rules(NamedTuple):
    """What the name of a pre-tokenizer stands for."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    whole_words_first: bool = False  # a piece that is a token is never merged up from bytes
    add_bos: bool = False  # where the file does not say
    nfc: bool = False


RULES = {
    "gpt-2": Rules(_gpt2),
    "smollm": Rules(lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])),
    "llama-bpe": Rules(lambda: _split(r"\p{N}{1,3}"), whole_words_first=True, add_bos=True),
    "qwen2": Rules(lambda: _split(r"\p{N}"), nfc=True),
}

SPECIAL_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}  # Hugging Face to GGUF


def write_tokenizer(metadata: Metadata, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, where the file has a template, chat_template.jinja.

    Raises UnsupportedGGUF for a tokenizer other than byte-level BPE of a known pre-tokenizer, InvalidGGUF for tokens,
    merges and special ids that do not fit together.
    """
    tokens = metadata.array("tokenizer.ggml.tokens", str)
    special = {name: special_id(metadata, key, len(tokens)) for name, key in SPECIAL_KEYS.items()}
    build_tokenizer(metadata, tokens).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata.required("llama.context_length", int),
        "clean_up_tokenization_spaces": False,  # would alter decoded text: "a ." to "a."
        **{name: tokens[token_id] for name, token_id in special.items() if token_id is not None},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    template = metadata.optional("tokenizer.chat_template", str)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")


def special_id(metadata: Metadata, name: str, vocab_size: int) -> int | None:
    """The id at `tokenizer.ggml.NAME_token_id`, None where the file has none. Raises InvalidGGUF outside the vocabulary."""
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = metadata.optional(key, int)
    if token_id is not None and not 0 <= token_id < vocab_size:
        raise InvalidGGUF(f"{key} is {token_id}, outside of the {vocab_size} tokens")
    return token_id


def build_tokenizer(metadata: Metadata, tokens: list[str]) -> Tokenizer:
    """The byte-level BPE tokenizer of `tokens`, in id order, and the file's merges. Errors: see `write_tokenizer`."""
    rules = _rules(metadata)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise InvalidGGUF(f"{len(tokens) - len(vocab)} of the {len(tokens)} tokens occur twice")
    merges = [_merge(merge, vocab) for merge in metadata.array("tokenizer.ggml.merges", str)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rules.whole_words_first))
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rules.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.array("tokenizer.ggml.token_type", int)
    if len(kinds) != len(tokens):
        raise InvalidGGUF(f"{len(tokens)} tokens but {len(kinds)} token types")
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != TokenType.USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
        ]
    )
    first = _added(metadata, "bos", rules.add_bos, tokens)
    last = _added(metadata, "eos", False, tokens)
    if first or last:
        template = [*(token for token, _ in first), "$A", *(token for token, _ in last)]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[*first, *last])
    return tokenizer


def _rules(metadata: Metadata) -> Rules:
    model = metadata.required("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise UnsupportedGGUF(f"tokenizer model {model!r} is not supported, only 'gpt2' (byte-level BPE)")
    name = metadata.optional("tokenizer.ggml.pre", str)
    if name not in RULES:
        raise UnsupportedGGUF(f"pre-tokenizer {name!r} is not known, only {', '.join(sorted(RULES))}")
    return RULES[name]


def _merge(merge: str, vocab: dict[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")  # a space inside a token is written as another character
    if not (left in vocab and right in vocab and left + right in vocab):
        raise InvalidGGUF(f"the merge {merge!r} joins or makes no token of the vocabulary")
    return left, right


def _added(metadata: Metadata, name: str, default: bool, tokens: list[str]) -> list[tuple[str, int]]:
    """The token that the file wants before ("bos") or after ("eos") every text, as its text and id, or none."""
    wanted = metadata.optional(f"tokenizer.ggml.add_{name}_token", bool)
    if not (default if wanted is None else wanted):
        return []
    token_id = special_id(metadata, name, len(tokens))
    if token_id is None:
        raise InvalidGGUF(f"every text must have a {name} token, but tokenizer.ggml.{name}_token_id is missing")
    return [(tokens[token_id], token_id)]
