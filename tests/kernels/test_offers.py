"""Offers of ranks: what the best of them gives is what all logits together give."""

import pytest
import torch

from kernels.offers import FAILED, NAN, best_offer_torch, best_offer_triton, keys_of, offer_torch, offer_triton
from kernels.sampling import greedy_torch, sample_torch
from tests.kernels.support import DEVICE, generator, implementations, randn

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # NumPy, in the interpreter
WAYS = list(zip(implementations(offer_torch, offer_triton), implementations(best_offer_torch, best_offer_triton), strict=True))


@pytest.mark.parametrize("offer, best_offer", WAYS)
@pytest.mark.parametrize("rows, columns, ranks", [(1, 7, 2), (3, 40, 3), (130, 33, 8)])
@pytest.mark.parametrize("random", [False, True])
def test_the_best_offer_is_the_choice_among_all_columns(offer, best_offer, rows: int, columns: int, ranks: int, random: bool) -> None:
    logits = (4 * randn(rows, ranks * columns, seed=rows)).round() / 4  # equal ones among them
    logits[0] = -torch.inf
    logits[1:2, 3] = torch.nan
    logits[2:3, ::5] = 0.0
    logits[2:3, 1::5] = -0.0
    logits[2:3, 2::5] = -1.0
    temperature = torch.tensor([0.7, 0.0, 1.3], device=DEVICE).repeat(rows)[:rows]
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator(1), device=DEVICE)
    positions = torch.randint(0, 131072, (rows,), generator=generator(2), dtype=torch.int32, device=DEVICE)
    zeros, ones = torch.zeros(rows, dtype=torch.int32, device=DEVICE), torch.ones(rows, device=DEVICE)
    offers = []
    for rank, own in enumerate(logits.split(columns, dim=1)):  # as ranks have them: not contiguous
        first = rank * columns
        if random:
            ids = sample_torch(own, temperature, zeros, ones, ones - 1, seeds, positions, first)
            offers.append(offer(own, ids, first, temperature, seeds, positions))
        else:
            ids = greedy_torch(own)
            offers.append(offer(own, ids.where(ids == FAILED.value, ids + first), first))
    expected = sample_torch(logits, temperature, zeros, ones, ones - 1, seeds, positions) if random else greedy_torch(logits)
    assert best_offer(torch.stack(offers, dim=1)).tolist() == expected.tolist()


@pytest.mark.parametrize("offer, best_offer", WAYS)
def test_the_best_of_thousands(offer, best_offer) -> None:
    offers = keys_of(randn(5, 2500, seed=1), torch.arange(2500, device=DEVICE))
    offers[2, 2499], offers[3, 17] = NAN.value, NAN.value - 1
    assert best_offer(offers).tolist() == best_offer_torch(offers).tolist()


@pytest.mark.parametrize("offer, best_offer", WAYS)
def test_no_rows(offer, best_offer) -> None:
    empty = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert best_offer(offer(torch.zeros(0, 5, device=DEVICE), empty, 0)[:, None]).tolist() == []
