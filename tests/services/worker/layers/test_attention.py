"""The layer of attention: which batches rotate and attend in one operation, and that it is the same computation."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.rotated_attention import rotated_attention
from services.worker.distributed.communicator import SingleCommunicator
from services.worker.engine.batch import Batch
from services.worker.kvcache import CacheShape, allocate
from services.worker.layers.attention import Attention
from services.worker.layers.backends import Backends, backends
from services.worker.layers.rotary import Rotary
from services.worker.models.config import ModelConfig
from services.worker.models.registry import describe
from tests.services.worker.models.test_config import SHAPE

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PLAIN = backends(SingleCommunicator(), CPU, False)
PAGE_SIZE, PAGES = 4, 3  # of a slot


def config(q_heads: int) -> ModelConfig:
    """With two KV heads of 16."""
    shape = {**SHAPE, "architectures": ["Qwen3ForCausalLM"], "num_attention_heads": q_heads, "num_key_value_heads": 2, "head_dim": 16}
    _, read, _ = describe(shape, set())
    return read


def attended(given: Backends, q_heads: int, decodes: int, prefill: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer makes of so many decode rows and, behind them, a prompt of so many tokens, and its cache."""
    generator = torch.Generator().manual_seed(1)
    read = config(q_heads)
    layer = Attention(read, None, given)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    slots = decodes + (prefill > 0)
    (cache,) = allocate(CacheShape(1, PAGE_SIZE, 2, 16, torch.float32), 1 + slots * PAGES, CPU)
    for contents in (cache.k, cache.v):
        contents.copy_(torch.randn(contents.shape, generator=generator))
    positions = torch.cat((torch.arange(decodes) % (PAGES * PAGE_SIZE), torch.arange(prefill))).int()
    owners = torch.cat((torch.arange(decodes), torch.full((prefill,), decodes)))
    page_table = 1 + torch.arange(slots * PAGES, dtype=torch.int32).view(slots, PAGES)
    locations = page_table[owners, positions.long() // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    lengths = torch.cat((positions[:decodes] + 1, torch.full((int(prefill > 0),), prefill, dtype=torch.int32)))
    starts = torch.tensor([0, prefill] if prefill else [0], dtype=torch.int32)
    numbers = torch.arange(slots, dtype=torch.int32)
    batch = Batch(positions, positions, locations, None, numbers, lengths, starts, page_table, decodes, prefill)
    rotation = Rotary(read.rope, read.head_dim, 64)(positions)
    return layer(torch.randn(len(positions), read.hidden_size, generator=generator), batch, cache, rotation), cache.k, cache.v


@pytest.mark.parametrize(
    "q_heads, decodes, prefill, together",
    [
        (4, 16, 0, True),
        (4, 17, 0, False),
        (4, 3, 5, False),  # a prompt beside them
        (8, 2, 0, True),
        (8, 1, 0, False),  # a row alone
        (12, 2, 0, False),  # more query heads than pay off
    ],
)
def test_few_decode_rows_rotate_and_attend_in_one_operation(q_heads: int, decodes: int, prefill: int, together: bool) -> None:
    rows: list[int] = []

    def noting(q: Tensor, *rest: Tensor) -> Tensor:
        rows.append(len(q))
        return rotated_attention(q, *rest)  # type: ignore[arg-type]

    given = attended(replace(PLAIN, attend_rotated=noting), q_heads, decodes, prefill)
    assert rows == ([decodes] if together else [])
    for found, expected in zip(given, attended(PLAIN, q_heads, decodes, prefill), strict=True):
        assert found.equal(expected)


@pytest.mark.parametrize("device, deterministic, together", [(GPU, False, True), (GPU, True, False), (CPU, False, False)])
def test_that_operation_is_a_gpus_and_no_deterministic_one(device: torch.device, deterministic: bool, together: bool) -> None:
    assert (backends(SingleCommunicator(), device, deterministic).attend_rotated is rotated_attention) is together
