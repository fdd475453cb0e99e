"""What is tuned: the products that a rank's layers have, of a group of any size."""

import json

import pytest
import torch

from benchmarks.candidates import head, products
from benchmarks.workload import config_file
from services.worker.distributed.communicator import SingleCommunicator
from services.worker.layers.backends import backends
from services.worker.layers.mlp import MLP
from services.worker.layers.vocabulary import VocabularyTable
from services.worker.models.decoder import DecoderLayer
from services.worker.models.registry import describe
from shared.errors import ConfigError

CPU = torch.device("cpu")


class Alone(SingleCommunicator):
    """Rank 0 of a group that is not there: shapes need no more."""

    def __init__(self, size: int) -> None:
        self.size = size


@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
@pytest.mark.parametrize("model", ["Qwen3-32B", "Llama-3.1-8B"])
def test_the_products_are_those_of_a_rank(model: str, ranks: int) -> None:
    _, config, _ = describe(json.loads(config_file(model).read_text()), set())
    computing = backends(Alone(ranks), CPU, deterministic=False)
    with torch.device("meta"):
        layer, table = DecoderLayer(config, 0, computing), VocabularyTable(config.vocab_size, config.hidden_size, computing)
    assert isinstance(layer.mlp, MLP)
    held = [tuple(each.weight.shape) for each in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)]
    assert [((2 if each.gated else 1) * each.columns, each.size) for each in products(model, ranks)] == held
    assert (head(model, ranks).columns, head(model, ranks).size) == tuple(table.weight.shape)


def test_ranks_that_do_not_divide_a_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor-parallel-size: 3 ranks do not divide Qwen3-14B"):
        products("Qwen3-14B", 3)
