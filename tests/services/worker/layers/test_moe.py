"""The layer of experts, with the residual addition and the norm behind it in one operation or apart."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.moe import moe, moe_add_norm
from services.worker.distributed.communicator import SingleCommunicator
from services.worker.layers.backends import Backends, backends
from services.worker.layers.linear import qkv_linear
from services.worker.layers.moe import MoE
from services.worker.layers.norm import RMSNorm
from services.worker.models.config import Experts

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
EXPERTS = Experts(6, 3, 24, True, frozenset((0,)))


class Pair(SingleCommunicator):
    size = 2


def added(given: Backends) -> tuple[Tensor, Tensor]:
    """The residual and what the following layer takes, behind a layer whose weights are always the same."""
    generator = torch.Generator().manual_seed(1)
    layer, norm = MoE(32, EXPERTS, given), RMSNorm(32, 1e-6)
    for parameter in (*layer.parameters(), *norm.parameters()):
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    x, residual = torch.randn(5, 32, generator=generator), torch.randn(5, 32, generator=generator)
    return residual, layer.add(x, residual, norm, qkv_linear(32, 8, 4, 2, False, given))


def test_the_norm_behind_the_experts_is_the_same_made_with_their_sum_or_behind_it() -> None:
    apart = replace(backends(SingleCommunicator(), CPU, False), experts=moe)
    (residual, normed), (expected_residual, expected) = added(replace(apart, add_experts=moe_add_norm)), added(apart)
    assert residual.equal(expected_residual)
    assert normed.equal(expected)


@pytest.mark.parametrize(
    "group, device, deterministic, together",
    [
        (SingleCommunicator(), GPU, False, True),
        (Pair(), GPU, False, False),  # the sum over the ranks lies between
        (SingleCommunicator(), GPU, True, False),
        (SingleCommunicator(), CPU, False, False),
    ],
)
def test_they_are_one_operation_on_one_gpu(group: SingleCommunicator, device: torch.device, deterministic: bool, together: bool) -> None:
    assert (backends(group, device, deterministic).add_experts is moe_add_norm) is together
