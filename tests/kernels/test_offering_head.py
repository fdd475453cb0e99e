"""The head that chooses: what its offers choose is what `sample` chooses from all logits, and rows that ask for more have theirs."""

import pytest
import torch
from torch import Tensor

from kernels.offering_head import Config, Noise, Scores, config, offering_head, offering_head_torch, offering_head_triton
from kernels.offers import FAILED, UNDECIDED, best_offer_torch, best_offer_triton
from kernels.sampling import greedy_torch, sample_torch
from kernels.tuning import Table
from tests.chi_square import assert_distributed
from tests.kernels.support import DEVICE, DTYPES, INTERPRETED, ON_GPU, assert_near, generator, randn

pytestmark = [
    pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="tests the kernel beside its reference"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),  # NumPy, in the interpreter
]

# Rows, columns, of which real, inner size: one row without tensor cores; columns on the tall side; tiles that are cut into parts; tiles
# of rows and columns and steps that are not full; padding of a whole tile and more.
CASES = [
    (1, 70, 70, 96, Config(1, 16, 32, 4, 2, 0)),
    (3, 130, 127, 64, Config(8, 64, 32, 4, 2, 1)),
    (5, 96, 96, 72, Config(16, 32, 64, 4, 2, 1)),
    (20, 200, 100, 72, Config(16, 64, 32, 4, 2, 0)),
    (20, 150, 149, 64, Config(16, 128, 64, 1, 2, 0)),
    (40, 140, 140, 64, Config(32, 128, 32, 1, 2, 0)),
]
FIRST = 1000


def asked(rows: int) -> tuple[Noise, Tensor]:
    """Temperatures, among them 0, seeds and positions; every third row asks for more."""
    temperature = torch.tensor([0.7, 0.0, 1.3, 5.0], device=DEVICE).repeat(rows)[:rows]
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator(1), device=DEVICE)
    positions = torch.randint(0, 131072, (rows,), generator=generator(2), dtype=torch.int32, device=DEVICE)
    return (temperature, seeds, positions), (torch.arange(rows, device=DEVICE) % 3 == 2).int()


def chosen(logits: Tensor, noise: Noise, first: int = FIRST) -> list[int]:
    temperature, seeds, positions = noise
    ones = torch.ones_like(temperature)
    ids: list[int] = sample_torch(logits, temperature, torch.zeros_like(positions), ones, ones - 1, seeds, positions, first).tolist()
    return ids


def choice(scored: Scores) -> list[int]:
    assert best_offer_torch(scored.wanted_offers).tolist() == best_offer_triton(scored.wanted_offers).tolist()
    return best_offer_triton(scored.wanted_offers).tolist()


@pytest.mark.parametrize("rows, columns, real, size, tuned", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_offers_choose_what_is_chosen_from_the_logits(rows, columns, real, size, tuned, dtype) -> None:
    x, weight = randn(rows, size, seed=1, dtype=dtype), 2 * randn(columns, size, seed=2, dtype=dtype) / size**0.5
    noise, asks = asked(rows)
    every = offering_head_triton(x, weight, real, FIRST, noise, None, True, tuned)
    assert_near(every.wanted_logits[:, :real], x.double() @ weight[:real].double().T, ulps=1, floor=3e-6)
    assert (every.wanted_logits[:, real:] == -torch.inf).all()
    expected = chosen(every.wanted_logits, noise)
    assert choice(every) == expected
    assert choice(offering_head_triton(x, weight, real, FIRST, noise, None, False, tuned)) == expected
    greedy = offering_head_triton(x, weight, real, FIRST, None, None, False, tuned)
    assert greedy.logits is None
    assert choice(greedy) == (greedy_torch(every.wanted_logits) + FIRST).tolist()

    mixed = offering_head_triton(x, weight, real, FIRST, noise, asks, False, tuned)
    assert torch.equal(mixed.wanted_logits[asks == 1], every.wanted_logits[asks == 1])
    assert ((mixed.wanted_offers == UNDECIDED.value) == (asks == 1)[:, None]).all()
    assert [token for token, more in zip(choice(mixed), asks.tolist(), strict=True) if not more] == [
        token for token, more in zip(expected, asks.tolist(), strict=True) if not more
    ]
    all_of_mixed = offering_head_triton(x, weight, real, FIRST, noise, asks, True, tuned)
    assert torch.equal(all_of_mixed.wanted_offers, mixed.wanted_offers)
    assert torch.equal(all_of_mixed.wanted_logits, every.wanted_logits)


@pytest.mark.parametrize("rows, columns, real, size, tuned", CASES)
def test_the_reference_offers_the_same(rows, columns, real, size, tuned) -> None:
    x, weight = randn(rows, size, seed=1), 2 * randn(columns, size, seed=2) / size**0.5
    noise, asks = asked(rows)
    wanted: list[tuple[Noise | None, Tensor | None, bool]] = [(None, None, False), (noise, None, False), (noise, asks, False)]
    for given in wanted:
        ours = offering_head_triton(x, weight, real, FIRST, *given, tuned)
        reference = offering_head_torch(x, weight, real, FIRST, *given)
        assert choice(ours) == choice(reference)
        assert (ours.logits is None) == (reference.logits is None)
        if ours.logits is not None and reference.logits is not None:
            torch.testing.assert_close(ours.logits[asks == 1], reference.logits[asks == 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tuned", [CASES[1][-1], CASES[4][-1]])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_equals_go_to_the_lowest_id_and_a_nan_fails_its_row(tuned, temperature) -> None:
    x, weight = torch.zeros(4, 64, device=DEVICE), torch.zeros(200, 64, device=DEVICE)
    x[:, 0], x[3, 7] = torch.tensor([1.0, -1.0, 1.0, 1.0]), torch.nan
    weight[[150, 160], 0] = 1e38  # infinite, with the other
    weight[[150, 160], 1] = 1e38
    x[:, 1] = 1e3 * x[:, 0]
    numbers = torch.arange(4, device=DEVICE)
    noise = None if temperature is None else (torch.full((4,), temperature, device=DEVICE), numbers, numbers.int())
    first, second, third, fourth = choice(offering_head_triton(x, weight, 200, 0, noise, None, False, tuned))
    assert first == third == 150
    assert second == 0 if temperature is None else second not in (150, 160)
    assert fourth == FAILED.value
    forbidden = weight[150:151].expand(200, -1).contiguous()  # the second row's logits are all -inf
    assert choice(offering_head_triton(x, forbidden, 3, 40, noise, None, False, tuned))[1] == 40


@pytest.mark.parametrize("tuned", [CASES[1][-1], CASES[4][-1]])
def test_a_rank_of_padding_alone_offers_nothing_that_wins(tuned) -> None:
    x, weight = randn(3, 64, seed=1), randn(130, 64, seed=2)
    padding = offering_head_triton(x, torch.zeros_like(weight), 0, 130, None, None, True, tuned)
    real = offering_head_triton(x, weight, 130, 0, None, None, True, tuned)
    assert (padding.wanted_logits == -torch.inf).all()
    both = best_offer_triton(torch.cat((padding.wanted_offers, real.wanted_offers), dim=1))
    assert both.tolist() == greedy_torch(real.wanted_logits).tolist()


def test_tokens_are_distributed_as_the_temperature_says() -> None:
    rows, columns, temperature = 4000 if ON_GPU else 1000, 33, 1.4
    weight = torch.diag(torch.full((64,), 1.0, device=DEVICE))[:columns]
    x = (2 * randn(1, 64, seed=4)).expand(rows, -1).contiguous()
    hot, numbers = torch.full((rows,), temperature, device=DEVICE), torch.arange(rows, device=DEVICE)
    scored = offering_head_triton(x, weight, columns, 0, (hot, numbers, numbers.int()), None, False, Config(64, 64, 64, 4, 2, 0))
    tokens = best_offer_triton(scored.wanted_offers)
    assert_distributed(tokens.cpu(), (x[0, :columns].cpu().double() / temperature).softmax(dim=0))


def test_a_configuration_serves_up_to_its_rows(table: Table) -> None:
    table["offering_head"] = {"300x64": {"8": [8, 64, 32, 4, 2, 1], "64": []}}
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    assert config(device, dtype, 5, 300, 64) == Config(8, 64, 32, 4, 2, 1)
    assert config(device, dtype, 9, 300, 64) is None
    assert config(device, dtype, 65, 300, 64) is None
    assert config(device, dtype, 0, 300, 64) is None
    assert config(device, dtype, 5, 301, 64) is None


def test_without_a_configuration_nothing_is_computed(table: Table) -> None:
    assert offering_head(randn(3, 64, seed=1), randn(100, 64, seed=2), 100, 0, None, None, False) is None


def test_rows_must_be_contiguous() -> None:
    x, weight = randn(4, 128, seed=1)[:, ::2], randn(100, 64, seed=2)
    with pytest.raises(ValueError, match="contiguous"):
        offering_head_triton(x, weight, 100, 0, None, None, False, CASES[1][-1])
