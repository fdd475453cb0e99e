import math

import pytest
import torch

from kernels.logprobs import NO_ID, logprobs_torch, logprobs_triton
from kernels.search import ROOM
from tests.kernels.support import DEVICE, ON_GPU, implementations, randn

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy, in the interpreter

IMPLEMENTATIONS = implementations(logprobs_torch, logprobs_triton)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "rows, columns, k, first",
    [(0, 8, 2, 0), (1, 1, 1, 0), (3, 37, 20, 0), (5, 1000, 20, 1000), (2, 5, 20, 7), (2, 64, 0, 0), (1, ROOM + 1500, 5, 0)],
)
def test_values_equal_float64_and_equal_logits_come_by_id(implementation, rows: int, columns: int, k: int, first: int) -> None:
    logits = (randn(rows, columns, seed=columns) * 8).round() / 4  # so that many are equal
    if columns > 2:
        logits[:, 1] = -torch.inf
    chosen = torch.arange(rows, dtype=torch.int32, device=DEVICE) * 7 % columns + first
    total, chosen_logits, top_ids, top_logits = implementation(logits, chosen, k, first)
    torch.testing.assert_close(total.double(), logits.double().logsumexp(dim=1), rtol=1e-6, atol=1e-6)
    for row, values in enumerate(logits.tolist()):
        assert chosen_logits[row] == values[int(chosen[row]) - first]
        order = sorted(range(columns), key=lambda column: (-values[column], column))[:k]
        assert top_ids[row].tolist() == [column + first for column in order] + [NO_ID] * (k - len(order))
        assert top_logits[row].tolist() == [values[column] for column in order] + [-math.inf] * (k - len(order))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_more_equal_logits_than_the_kernel_gathers(implementation) -> None:
    logits = torch.zeros(3, ROOM + 900, device=DEVICE)
    logits[1, 700:703] = torch.tensor([1.0, 2.0, 1.0])
    logits[2] = -math.inf
    chosen = torch.tensor([5, 701, 9], dtype=torch.int32, device=DEVICE)
    total, chosen_logits, top_ids, _ = implementation(logits, chosen, 4)
    torch.testing.assert_close(total, logits.logsumexp(dim=1))
    assert chosen_logits.tolist() == [0, 2, -math.inf]
    assert top_ids.tolist() == [[0, 1, 2, 3], [701, 700, 702, 0], [0, 1, 2, 3]]


@pytest.mark.skipif(not ON_GPU, reason="a whole vocabulary")
def test_a_whole_vocabulary_in_half_precision() -> None:
    logits = randn(3, 151_936, seed=1, dtype=torch.bfloat16)
    chosen = torch.tensor([0, 151_935, 70_000], dtype=torch.int32, device=DEVICE)
    ours, reference = logprobs_triton(logits, chosen, 20), logprobs_torch(logits, chosen, 20)
    torch.testing.assert_close(ours[0], reference[0], rtol=1e-5, atol=1e-5)
    assert all(one.equal(other) for one, other in zip(ours[1:], reference[1:], strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_id_of_another_rank_has_no_logit_here(implementation) -> None:
    chosen = torch.tensor([-1, 3, 4, 7, 8], dtype=torch.int32, device=DEVICE)
    _, chosen_logits, _, _ = implementation(torch.zeros(5, 4, device=DEVICE), chosen, 1, first=4)
    assert chosen_logits.tolist() == [-math.inf, -math.inf, 0, 0, -math.inf]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_columns_of_ranks_go_together(implementation) -> None:
    logits = (randn(4, 60, seed=1) * 8).round() / 4
    chosen = torch.tensor([0, 59, 20, 21], dtype=torch.int32, device=DEVICE)
    whole = implementation(logits, chosen, 5)
    parts = [implementation(logits[:, first : first + 20].contiguous(), chosen, 5, first) for first in (0, 20, 40)]
    total, chosen_logits, top_ids, top_logits = (torch.stack(each, dim=1) for each in zip(*parts, strict=True))
    torch.testing.assert_close(total.logsumexp(dim=1), whole[0])
    assert torch.equal(chosen_logits.amax(dim=1), whole[1])
    values, order = top_logits.flatten(1).sort(dim=1, descending=True, stable=True)  # ranks in order: of equals the lower id stays first
    assert torch.equal(values[:, :5], whole[3])
    assert torch.equal(top_ids.flatten(1).gather(1, order)[:, :5], whole[2])
