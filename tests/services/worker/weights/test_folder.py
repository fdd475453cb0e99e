"""Which files of a folder are read, and what is said of a folder that cannot be served."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.worker.weights.folder import LoadFormat, ModelFolder
from services.worker.weights.random_weights import randomise
from shared.errors import ConfigError
from tests.services.worker.weights.checkpoint import shard, write
from tests.tiny import weightless_model


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    "names, message",
    [
        ([], "no model.safetensors"),
        (["pytorch_model.bin"], r"pytorch_model\.bin is a pickle.*convert the checkpoint to safetensors"),
        (["consolidated.00.pth"], r"consolidated\.00\.pth is a pickle"),
        (["model.pt"], r"model\.pt is a pickle"),
        (["consolidated.safetensors"], r"only consolidated\.safetensors, Mistral's own layout"),
        (["model.safetensors", "hf_quant_config.json"], r"hf_quant_config\.json says that the weights are quantised"),
        (["model.safetensors", "quantize_config.json"], r"quantize_config\.json says that the weights are quantised"),
    ],
)
def test_mod_07_a_folder_that_cannot_be_loaded_says_why(folder, names, message):
    for name in names:
        (folder / name).touch()
    with pytest.raises(ConfigError, match=f"{folder}: {message}"):
        _ = ModelFolder(folder).weight_files


def test_a_single_file_wins_over_others_and_pickles_beside_it_do_no_harm(folder):
    for name in ("pytorch_model.bin", "consolidated.safetensors", "model-00001-of-00002.safetensors"):
        (folder / name).touch()
    save_file({"weight": torch.ones(2)}, folder / "model.safetensors")
    assert ModelFolder(folder).tensors.keys() == {"weight"}


def test_numbered_files_need_no_index(tmp_path):
    folder = write(tmp_path / "model", {"a": torch.ones(2)}, {"b": torch.ones(2)})
    (folder / "model.safetensors.index.json").unlink()
    assert ModelFolder(folder).tensors.keys() == {"a", "b"}


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 3}, {"a": "../model.safetensors"}, {"a": "absent.safetensors"}])
def test_an_index_names_files_of_its_own_folder(folder, weight_map):
    save_file({"a": torch.ones(2)}, folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
        _ = ModelFolder(folder).weight_files


def test_a_tensor_in_two_files_is_refused_where_no_index_names_it(tmp_path):
    folder = write(tmp_path / "model", {"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(2)})
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match=r"a is in model-00000-of-00002\.safetensors and in model-00001"):
        _ = ModelFolder(folder).tensors


def test_of_a_tensor_in_two_files_the_one_counts_that_the_index_names(tmp_path):
    folder = write(tmp_path / "model", {"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(2, 3), "c": torch.ones(2)})
    names = [file.name for file in ModelFolder(folder).weight_files]
    index = folder / "model.safetensors.index.json"
    for owner, shape in zip(names, [(2,), (2, 3)], strict=True):
        index.write_text(json.dumps({"weight_map": {"a": owner, "b": names[0], "c": names[1]}}))
        tensors = ModelFolder(folder).tensors
        assert tensors.keys() == {"a", "b", "c"}
        assert (tensors["a"].file.name, tensors["a"].shape) == (owner, shape)


def test_a_tokenizer_of_sentencepiece_alone_says_what_to_do(folder):
    (folder / "tokenizer.model").touch()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json, and tokenizer\.model is not read: let transformers save"):
        _ = ModelFolder(folder).text_files


def test_the_fingerprint_covers_shapes_and_dtypes_and_tells_random_weights(tmp_path):
    model = weightless_model(tmp_path / "model")

    def fingerprint(load_format: LoadFormat = "auto") -> str:
        return ModelFolder(model, load_format).fingerprint

    random = fingerprint("random")
    prints = [random, fingerprint()]
    for tensor in (torch.ones(2), torch.ones(2, 1), torch.ones(2, dtype=torch.bfloat16)):
        save_file({"weight": tensor}, model / "model.safetensors")
        prints.append(fingerprint())
    assert len(set(prints)) == 5
    (model / "model.safetensors").unlink()
    assert fingerprint("random") == random
    assert ModelFolder(model, "random").tensors == {}


def test_random_weights_are_the_same_however_they_are_cut(tmp_path: Path):
    whole, norm, other = shard("a.weight", (64, 700)), shard("norm.weight", (9,)), shard("b.weight", (64, 700))
    halves = [shard("a.weight", (64, 700), slice(0, 64), part) for part in (slice(0, 350), slice(350, 700))]
    rows = shard("a.weight", (64, 700), slice(16, 48), dtype=torch.bfloat16)
    randomise({"initializer_range": 0.5}, [whole, norm, other, *halves, rows], lambda phase, part: None)
    assert torch.equal(torch.cat([half.target for half in halves], dim=1), whole.target)
    assert torch.equal(rows.target, whole.target[16:48].bfloat16())
    assert bool((norm.target == 1).all())
    assert abs(float(whole.target.mean())) < 0.02
    assert 0.48 < float(whole.target.std()) < 0.52
    assert not torch.equal(whole.target, other.target)


def test_eos_ids_are_united_from_every_file_that_names_one(folder):
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7, "text_config": {"eos_token_id": [2, 9]}}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 11, "content": "<end>"}, {"id": 12, "content": "<pad>"}]}))
    assert ModelFolder(folder).eos_ids == (2, 5, 7, 9, 11)


@pytest.mark.parametrize(
    "model", [{"vocab": {"<a>": 1, "<end>": 4}}, {"vocab": [["<a>", 0.0], ["<b>", 0.0], ["<c>", 0.0], ["<d>", 0.0], ["<end>", -1.5]]}]
)
@pytest.mark.parametrize("named_by", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_tokenizers_end_may_be_a_piece_of_its_vocabulary_and_named_by_either_file(folder, model, named_by):
    (folder / named_by).write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": model}))
    assert ModelFolder(folder).eos_ids == (4,)


def test_an_end_that_is_no_token_is_none(folder):
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<end>"}))
    assert ModelFolder(folder).eos_ids == ()
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": None}}))
    assert ModelFolder(folder).eos_ids == ()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("tokenizer.json", {"model": {"vocab": {"<end>": -1}}}, "model.vocab"),
        ("config.json", {"eos_token_id": "</s>"}, "eos_token_id.0 is '</s>', but input should be a valid integer"),
        ("config.json", {"text_config": 3}, "text_config is 3, but input should be a valid dictionary"),
        ("generation_config.json", {"eos_token_id": [2, None]}, "eos_token_id.1 is None"),
        ("generation_config.json", {"eos_token_id": 2**31}, "eos_token_id.0 is 2147483648, but input should be less than 2147483648"),
        ("tokenizer_config.json", {"eos_token": ["<end>"]}, "eos_token is ['<end>'], but input should be a valid string"),
        ("tokenizer.json", {"added_tokens": [{"content": "<end>"}]}, "added_tokens.0.id is missing"),
        ("tokenizer.json", {"added_tokens": None}, "added_tokens is None"),
    ],
)
def test_what_names_no_end_is_told_with_its_file(folder, name, content, message):
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError) as refused:
        _ = ModelFolder(folder).eos_ids
    assert str(refused.value).startswith(f"{folder / name}: {message}")
    assert "\n" not in str(refused.value)


def test_json_that_is_nested_too_deeply_is_told_with_its_file(folder):
    (folder / "generation_config.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ConfigError, match=r"generation_config\.json: maximum recursion depth"):
        _ = ModelFolder(folder).eos_ids
