"""Tokenizer files as they are found: what they say of padding is not obeyed, what is none is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.tokenizer import load_tokenizer
from tests.tiny import TEXT, tiny_tokenizer


def edit(path: Path, **values: object) -> None:
    content: dict[str, Any] = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **values}))


def test_a_prompt_is_neither_cut_nor_padded_whatever_its_file_says(tmp_path: Path) -> None:
    ids = tiny_tokenizer(tmp_path).backend_tokenizer.encode(TEXT).ids
    padding = {
        "strategy": {"Fixed": 900},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    edit(tmp_path / "tokenizer.json", truncation=cut, padding=padding)
    assert load_tokenizer(tmp_path).backend_tokenizer.encode(TEXT).ids == ids


def test_blanks_before_punctuation_stay_whatever_a_file_says(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    also = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True}
    edit(tmp_path / "tokenizer_config.json", clean_up_tokenization_spaces=True, **also)
    tokenizer = load_tokenizer(tmp_path)
    text = "x != y , a . b , it 's"
    assert tokenizer.decode(tokenizer.backend_tokenizer.encode(text).ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer.json", {"version": "2.0"}),  # of packages to come
        ("tokenizer.json", {"model": {"type": "Strange", "vocab": {}}}),
        ("tokenizer.json", {"added_tokens": 3}),
        ("tokenizer_config.json", {"eos_token": ["<|im_end|>"]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"first": {"content": "x"}}}),
        ("special_tokens_map.json", []),
        ("added_tokens.json", 3),
    ],
)
def test_files_that_are_no_tokenizer_are_told(tmp_path: Path, name: str, content: object) -> None:
    tiny_tokenizer(tmp_path)
    if isinstance(content, dict):
        edit(tmp_path / name, **content)
    else:
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"^the model's tokenizer files cannot be loaded: ."):
        load_tokenizer(tmp_path)
