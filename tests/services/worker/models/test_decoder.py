"""What all families share."""

from typing import Any

import pytest
import torch

from services.worker.distributed.communicator import SingleCommunicator
from services.worker.layers.backends import backends
from services.worker.models.registry import describe
from tests.services.worker.models.test_config import SHAPE

SLIDING = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}


@pytest.mark.parametrize(
    "architecture, values, chosen",
    [
        ("LlamaForCausalLM", {}, [0, 2]),
        ("LlamaForCausalLM", {"num_hidden_layers": 1}, [0, 0]),
        ("Qwen3ForCausalLM", {**SLIDING, "layer_types": ["full_attention", "full_attention", "sliding_attention"]}, [0, 2, 2]),
    ],
)
def test_of_each_kind_of_layer_one_is_chosen_and_the_last(architecture: str, values: dict[str, Any], chosen: list[int]) -> None:
    cls, config, _ = describe({**SHAPE, "architectures": [architecture], **values}, set())
    with torch.device("meta"):
        model = cls(config, backends(SingleCommunicator(), torch.device("cpu"), False), 128)
    layers = [*model.layers]
    assert [layers.index(layer) for layer in model.layer_of_each_kind()] == chosen
