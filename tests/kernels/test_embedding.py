import pytest
import torch

from kernels.embedding import embedding_torch, embedding_triton
from tests.kernels.support import DEVICE, DTYPES, implementations, randn


@pytest.mark.parametrize("implementation", implementations(embedding_torch, embedding_triton))
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 576, 4097])
def test_the_ranks_sum_is_the_embedding(implementation, ids_dtype, dtype, size):
    weight = randn(20, size, seed=size, dtype=dtype)
    ids = torch.tensor([0, 19, 12, 13, 6, 7, 0], dtype=ids_dtype, device=DEVICE)
    parts = [implementation(ids, weight[first:last].contiguous(), first) for first, last in ((0, 7), (7, 13), (13, 20))]
    assert parts[0].dtype == dtype
    assert torch.stack(parts).sum(dim=0).equal(weight[ids.long()])


@pytest.mark.parametrize("implementation", implementations(embedding_torch, embedding_triton))
def test_foreign_ids_give_zeros_even_beside_a_nan(implementation):
    weight = torch.full((4, 8), torch.nan, device=DEVICE)
    assert implementation(torch.tensor([-2, 3, 8, 2**31 - 1], dtype=torch.int32, device=DEVICE), weight, 4).equal(
        torch.zeros(4, 8, device=DEVICE)
    )
