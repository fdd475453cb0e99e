"""Checkpoints in other layouts than the one that transformers writes today."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import ConfigError
from tests.services.worker.models.checkpoints import MAKERS, edit_config, llama, make, rope
from tests.services.worker.models.group import Group, Job, Local
from tests.services.worker.models.reference import check, logits

Checkpoint = Callable[[str], Path]
Groups = Callable[[int], Group | Local]
PROMPTS = (tuple(range(3, 50)), (7, 8, 9))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    file = folder / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in edit(load_file(file)).items()}, file)
    return folder


def remade(name: str, folder: Path, **saving: Any) -> Path:
    torch.manual_seed(0)
    return make(MAKERS[name](), folder, **saving)


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_in_one_tensor_and_one_by_one_are_the_same(tmp_path: Path, checkpoint: Checkpoint, group: Groups, ranks: int) -> None:
    folder = remade("qwen3-moe-dense-layers", tmp_path / "packed", save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(folder / "model.safetensors")
    one_by_one = checkpoint("qwen3-moe-dense-layers")
    assert "model.layers.1.mlp.experts.0.gate_proj.weight" in load_file(one_by_one / "model.safetensors")
    outcomes = [group(ranks).run(Job(each, PROMPTS, 4))[0] for each in (folder, one_by_one)]
    np.testing.assert_array_equal(outcomes[0].logits, outcomes[1].logits)


def test_both_layouts_of_mistral3_are_the_same(tmp_path: Path, checkpoint: Checkpoint, group: Groups) -> None:
    old, new = "language_model.model.layers.0.mlp.down_proj.weight", "model.language_model.layers.0.mlp.down_proj.weight"
    folder = remade("mistral3", tmp_path / "other", save_original_format=False)
    found = {name for each in (folder, checkpoint("mistral3")) for name in load_file(each / "model.safetensors")}
    assert {old, new} <= found
    outcomes = [group(1).run(Job(each, PROMPTS, 4))[0] for each in (folder, checkpoint("mistral3"))]
    np.testing.assert_array_equal(outcomes[0].logits, outcomes[1].logits)


def test_theta_and_scaling_beside_each_other_as_transformers_4_wrote_them(tmp_path: Path, checkpoint: Checkpoint, group: Groups) -> None:
    folder = remade("llama", tmp_path / "old")

    def old(config: dict[str, Any]) -> None:
        scaling = config.pop("rope_parameters")
        config["rope_theta"] = scaling.pop("rope_theta")
        config["rope_scaling"] = scaling
        config["torch_dtype"] = config.pop("dtype")

    edit_config(folder, old)
    (outcome,) = group(1).run(Job(folder, PROMPTS, 4))
    check(checkpoint("llama"), PROMPTS, outcome)


def test_the_original_context_beside_the_parameters_of_a_rotary_embedding_wins(tmp_path: Path, group: Groups) -> None:
    def outside(config: dict[str, Any]) -> None:
        config["rope_scaling"] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "finetuned": True}
        config["original_max_position_embeddings"] = 32
        del config["rope_parameters"]

    folder = edit_config(remade("llama", tmp_path / "outside"), outside)
    (outcome,) = group(1).run(Job(folder, PROMPTS, 4))
    check(folder, PROMPTS, outcome)


def test_mod_01_tied_embeddings(tmp_path: Path, checkpoint: Checkpoint, group: Groups, caplog: pytest.LogCaptureFixture) -> None:
    def with_a_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**tensors, "lm_head.weight": torch.ones_like(tensors["model.embed_tokens.weight"])}

    tied = checkpoint("llama-biased")
    check(tied, PROMPTS, group(1).run(Job(tied, PROMPTS, 4))[0])

    stray = edit_tensors(remade("llama-biased", tmp_path / "stray"), with_a_head)
    with caplog.at_level(logging.WARNING):
        check(tied, PROMPTS, group(1).run(Job(stray, PROMPTS, 4))[0])
    assert "lm_head.weight is not used: tie_word_embeddings makes the embedding the head" in caplog.text

    untied = checkpoint("llama")
    assert "lm_head.weight" in load_file(untied / "model.safetensors")
    check(untied, PROMPTS, group(1).run(Job(untied, PROMPTS, 4))[0])

    headless = remade("llama", tmp_path / "headless")
    edit_tensors(headless, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})
    with pytest.raises(ConfigError, match=r"missing.*lm_head\.weight"):
        group(1).run(Job(headless, PROMPTS))


def test_mod_05_yarn_extends_the_context(tmp_path: Path, group: Groups) -> None:
    torch.manual_seed(0)
    folder = make(llama(max_position_embeddings=128, rope_parameters=rope("yarn", factor=4.0)), tmp_path / "yarn")
    prompt = (tuple(np.random.default_rng(0).integers(3, 257, 480).tolist()),)
    local = group(1)
    assert isinstance(local, Local)
    check(folder, prompt, local.run(Job(folder, prompt, 32))[0])
    assert local.runner.engine(Job(folder, prompt)).facts.max_length == 512
    with pytest.raises(ConfigError, match="max_model_len: 513 is more than the model's 512 positions"):
        local.run(Job(folder, prompt, spec={"max_model_len": 513}))


def test_dynamic_ntk_is_made_for_the_longest_context_that_is_admitted(tmp_path: Path, group: Groups) -> None:
    torch.manual_seed(0)
    folder = make(llama(max_position_embeddings=128, rope_parameters=rope("dynamic", factor=4.0)), tmp_path / "dynamic")
    prompt = tuple(np.random.default_rng(0).integers(3, 257, 300).tolist())
    (outcome,) = group(1).run(Job(folder, (prompt,), spec={"max_model_len": 300}))
    np.testing.assert_allclose(outcome.logits[0, 0], logits(folder, prompt)[-1], rtol=0, atol=1e-4)
    (short,) = group(1).run(Job(folder, (prompt[:100],), spec={"max_model_len": 128}))
    np.testing.assert_allclose(short.logits[0, 0], logits(folder, prompt[:100])[-1], rtol=0, atol=1e-4)
