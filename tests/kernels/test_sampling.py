import pytest
import torch
from torch import Tensor

from kernels.noise import gumbel
from kernels.offers import FAILED, NAN, UNDECIDED, keys_of
from kernels.sampling import greedy_torch, greedy_triton, sample_torch, sample_triton
from kernels.search import ROOM
from tests.chi_square import assert_distributed
from tests.kernels.support import DEVICE, INTERPRETED, ON_GPU, generator, implementations, randn

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # NumPy, in the interpreter

SAMPLERS = implementations(sample_torch, sample_triton)
INFINITY = torch.inf
Settings = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


def expected_id(logits: Tensor, settings: Settings, arguments: tuple[Tensor, ...], row: int, first: int) -> int:
    """The definition, one row in float64."""
    (temperature, top_k, top_p, min_p), seeds, positions = settings, arguments[4].cpu(), arguments[5].cpu()
    if logits.isnan().any():
        return int(FAILED.value)
    if temperature < 1e-5:
        return first + int((logits == logits.max()).nonzero()[0])
    order = logits.sort(descending=True, stable=True).indices
    scaled = (logits[order].double() - logits.max().double()) / temperature
    kept = min(top_k, len(order)) if top_k > 0 else len(order)
    probability = scaled[:kept].softmax(dim=0)
    if top_p < 1:
        kept = max(1, int((probability.cumsum(dim=0) - probability < top_p).sum()))
    kept = max(1, min(kept, int((scaled.exp() >= min_p).sum())))
    columns = order[:kept]
    noise = gumbel(seeds[row : row + 1], positions[row : row + 1], first + columns)[0].double()
    return first + int(columns[(scaled[:kept] + noise).argmax()])


def parameters(rows: list[Settings], seed: int) -> tuple[Tensor, ...]:
    columns = zip(*rows, strict=True)
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    settings = [torch.tensor(column, dtype=dtype, device=DEVICE) for column, dtype in zip(columns, dtypes, strict=True)]
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(rows),), generator=generator(seed), device=DEVICE)
    positions = torch.randint(0, 131072, (len(rows),), generator=generator(seed + 1), dtype=torch.int32, device=DEVICE)
    return *settings, seeds, positions


ROWS: list[Settings] = [
    (0.0, 0, 1.0, 0.0),
    (1e-6, 5, 0.5, 0.5),
    (1.0, 0, 1.0, 0.0),
    (0.6, 20, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (1.0, 50, 0.9, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.5, 0, 0.3, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, -1, 1.0, 0.1),
    (0.8, 30, 0.95, 0.05),
    (1.0, 1, 1.0, 0.0),
    (1.0, 10**9, 1.0, 0.0),
    (0.7, 0, 0.99, 0.02),
    (1.0, 0, 1.0, 1.0),
]

FEW_ROWS = [ROWS[index] for index in (0, 2, 4, 6, 10)]  # of each kind


@pytest.mark.parametrize("implementation", implementations(greedy_torch, greedy_triton))
@pytest.mark.parametrize("columns", [1, 37, 5000])
def test_greedy_takes_the_lowest_of_equals_and_marks_nan_rows(implementation, columns):
    logits = randn(6, columns, seed=columns)
    logits[1] = 2.0
    logits[2] = -INFINITY
    logits[3, columns // 2] = torch.nan
    logits[4, columns // 3 :] = 9.0
    ids = implementation(logits)
    assert ids.dtype == torch.int32
    assert ids.tolist() == [int(logits[0].argmax()), 0, 0, -2, columns // 3, int(logits[5].argmax())]


@pytest.mark.parametrize("implementation", SAMPLERS)
@pytest.mark.parametrize("columns, first", [(1, 0), (37, 0), (1500, 1000), (5000, 0)])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_every_combination_of_filters_matches_float64(implementation, columns, first, spread):
    if INTERPRETED and (columns, spread) in ((5000, 0.5), (37, 4.0), (1, 4.0)):
        pytest.skip("the interpreter is slow")
    logits = spread * randn(len(ROWS), columns, seed=columns)
    arguments = parameters(ROWS, seed=columns)
    expected = [expected_id(logits[row].cpu(), ROWS[row], arguments, row, first) for row in range(len(ROWS))]
    assert implementation(logits, *arguments, first).tolist() == expected


@pytest.mark.parametrize("implementation", SAMPLERS)
@pytest.mark.parametrize("settings", [(1.0, 5, 1.0, 0.0), (1.0, 0, 0.4, 0.0), (1.0, 9, 0.5, 0.0), (0.5, 0, 1.0, 0.3)])
def test_equal_logits_are_kept_by_lowest_id(implementation, settings):
    logits = torch.full((8, 1100), -INFINITY, device=DEVICE)  # ties across tiles, and ids that a mask forbids
    logits[:, 3::100] = 1.0
    logits[4:, 1050] = 2.0
    arguments = parameters([settings] * 8, seed=5)
    expected = [expected_id(logits[row].cpu(), settings, arguments, row, 0) for row in range(8)]
    assert implementation(logits, *arguments).tolist() == expected


@pytest.mark.parametrize("implementation", SAMPLERS)
@pytest.mark.parametrize("spread", [0.01, 1.0, 1e6])
def test_more_kept_ids_than_the_kernel_gathers(implementation, spread):
    columns = ROOM + 952
    rows: list[Settings] = [
        (1.0, ROOM + 500, 0.9, 0.0),
        (1.0, 0, 0.9, 0.0),
        (1.0, 40, 1.0, 0.0),
        (2.0, 40, 0.6, 0.0),
        (1.0, 0, 1.0, 1e-3),
        (1.0, 0, 0.999, 1e-3),
    ]
    logits = spread * randn(len(rows), columns, seed=1)
    logits[:, 100:120] = -INFINITY
    arguments = parameters(rows, seed=1)
    expected = [expected_id(logits[row].cpu(), rows[row], arguments, row, 0) for row in range(len(rows))]
    assert implementation(logits, *arguments).tolist() == expected


@pytest.mark.parametrize("implementation", SAMPLERS)
@pytest.mark.parametrize("settings", [(1.0, 0, 0.3, 0.0), (1.0, 50, 1.0, 0.0), (1.0, ROOM + 7, 1.0, 0.0), (1.0, ROOM + 7, 0.25, 0.0)])
def test_more_equal_logits_than_the_kernel_gathers(implementation, settings):
    logits = torch.full((3, ROOM + 952), 3.0, device=DEVICE)
    logits[1, 7::50] = 3.5
    logits[2], logits[2, ::3] = 0.0, -0.0  # which are equal
    arguments = parameters([settings] * 3, seed=8)
    expected = [expected_id(logits[row].cpu(), settings, arguments, row, 0) for row in range(3)]
    assert implementation(logits, *arguments).tolist() == expected


def dropped_trials(logits: Tensor, settings: Settings, arguments: tuple[Tensor, ...], row: int) -> int:
    """How many columns in turn, each the best of those before the one before it, are none that top-p keeps."""
    temperature, _, top_p, _ = settings
    order = logits.sort(descending=True, stable=True).indices
    probability = (logits[order].double() / temperature).softmax(dim=0)
    kept = max(1, int((probability.cumsum(dim=0) - probability < top_p).sum()))
    noise = gumbel(arguments[4][row : row + 1].cpu(), arguments[5][row : row + 1].cpu(), order)[0]
    scores, end, dropped = logits[order] / temperature + noise, len(order), 0
    while (end := int(scores[:end].argmax())) >= kept:
        dropped += 1
    return dropped


TRIED: list[Settings] = [
    (1.0, 0, 0.999, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.0, 0, 0.5, 0.0),
    (1.0, 0, 0.2, 0.0),
    (1.3, 0, 0.05, 0.0),
    (1.0, 0, 0.01, 0.0),
    (1.0, 0, 1e-4, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 0.9, 0.3),
    (1.0, 0, 0.2, 0.1),
    (1.0, 0, 1.0, 0.2),
]


@pytest.mark.parametrize("implementation", SAMPLERS)
@pytest.mark.parametrize("equal", [False, True])
def test_trials_that_top_p_drops(implementation, equal):
    logits, arguments = 0.64 * randn(len(TRIED), 4500, seed=31), parameters(TRIED, seed=32)
    if equal:
        logits = (4 * logits).round() / 4  # a dozen values, so that top-p ends among equal ones, and trials are some of these
    logits[:, 4400:] = -INFINITY  # padding of the vocabulary
    logits[:, 7::50] = -INFINITY
    dropped = [dropped_trials(logits[row].cpu(), TRIED[row], arguments, row) for row in range(len(TRIED))]
    assert 0 in dropped
    assert 1 in dropped
    assert max(dropped) >= 4
    expected = [expected_id(logits[row].cpu(), TRIED[row], arguments, row, 0) for row in range(len(TRIED))]
    assert implementation(logits, *arguments).tolist() == expected


@pytest.mark.parametrize("implementation", SAMPLERS)
@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16])
def test_flat_rows_beside_all_others(implementation, dtype):
    rows: list[Settings] = [TRIED[3], (0.0, 0, 0.9, 0.5), TRIED[1], (1.0, 0, 0.9, 0.0), TRIED[4], (1.0, 40, 0.9, 0.0), TRIED[8], TRIED[3]]
    logits, first = (0.64 * randn(len(rows), 4500, seed=33)).to(dtype), 75_968
    logits[3, 4321] = 30.0  # of nearly all mass
    logits[4, 2222] = torch.nan
    arguments = parameters(rows, seed=34)
    expected = [expected_id(logits[row].cpu().float(), rows[row], arguments, row, first) for row in range(len(rows))]
    assert implementation(logits, *arguments, first).tolist() == expected


@pytest.mark.parametrize("implementation", SAMPLERS)
@pytest.mark.parametrize("spread", [0.64, 3.0])
def test_the_rows_of_a_large_vocabulary(implementation, spread):
    settings: list[Settings] = [(0.7, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 0, 0.5, 0.0), (0.7, 50, 0.9, 0.0)]
    rows = settings * (16 if ON_GPU else 1)
    logits, arguments = spread * randn(len(rows), 151_936, seed=36), parameters(rows, seed=37)
    expected = [expected_id(logits[row].cpu(), rows[row], arguments, row, 0) for row in range(len(rows))]
    assert implementation(logits, *arguments).tolist() == expected


@pytest.mark.parametrize("implementation", SAMPLERS)
@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16])
def test_half_precision_changes_nothing(implementation, dtype):
    logits, arguments = randn(len(FEW_ROWS), 700, seed=3, dtype=dtype), parameters(FEW_ROWS, seed=3)
    assert implementation(logits, *arguments).equal(implementation(logits.float(), *arguments))


@pytest.mark.parametrize("implementation", SAMPLERS)
def test_infinite_logits_are_chosen_like_the_largest_of_a_greedy_row(implementation):
    rows = [*FEW_ROWS, (1.0, 0, 1.0, 0.1), (0.7, 0, 0.9, 0.3)]
    logits = randn(len(rows), 2100, seed=6)
    logits[:, [700, 2090]] = INFINITY
    assert implementation(logits, *parameters(rows, seed=6)).tolist() == [700] * len(rows)
    logits[:] = -INFINITY
    assert implementation(logits, *parameters(rows, seed=6), 10).tolist() == [10] * len(rows)


@pytest.mark.parametrize("implementation", SAMPLERS)
def test_a_nan_fails_its_row_alone(implementation):
    logits = randn(len(FEW_ROWS), 64, seed=1)
    arguments = parameters(FEW_ROWS, seed=2)
    before = implementation(logits, *arguments)
    logits[3, 63] = torch.nan
    logits[1, 0] = torch.nan
    after = implementation(logits, *arguments)
    assert after[[1, 3]].tolist() == [-2, -2]
    assert after[[0, 2, 4]].equal(before[[0, 2, 4]])


@pytest.mark.parametrize("implementation", SAMPLERS)
def test_a_row_does_not_depend_on_its_batch(implementation):
    logits, arguments = randn(len(FEW_ROWS), 300, seed=1), parameters(FEW_ROWS, seed=3)
    together = implementation(logits, *arguments)
    alone = [implementation(logits[row : row + 1], *(argument[row : row + 1] for argument in arguments)) for row in range(len(FEW_ROWS))]
    assert torch.cat(alone).equal(together)


@pytest.mark.parametrize("implementation", SAMPLERS)
def test_a_row_with_offers_is_decided_by_them_whatever_its_logits_are(implementation):
    logits, arguments = randn(len(FEW_ROWS), 4100, seed=1), parameters(FEW_ROWS, seed=3)
    expected = implementation(logits, *arguments, 7)
    offers = keys_of(randn(len(FEW_ROWS), 5, seed=2), torch.arange(30, 35, device=DEVICE))
    offers[3, 4] = NAN.value
    decided = torch.tensor([False, True, True, True, False], device=DEVICE)
    offers[~decided] = UNDECIDED.value
    logits[1], logits[2] = torch.nan, INFINITY
    ids = implementation(logits, *arguments, 7, offers)
    assert ids[~decided].equal(expected[~decided])
    assert ids[decided].tolist() == [*(30 + offers.argmax(dim=1))[1:3].tolist(), FAILED.value]


def exact(logits: Tensor, settings: Settings) -> Tensor:
    """The probability of each column `[V]`, float64, by the definition."""
    temperature, top_k, top_p, min_p = settings
    ordered, order = logits.double().cpu().sort(descending=True, stable=True)
    probability = (ordered / temperature).softmax(dim=0)
    if top_k > 0:
        probability[top_k:] = 0
    probability /= probability.sum()
    before = probability.cumsum(dim=0) - probability
    kept = ((before < top_p) | (top_p >= 1)) & (probability >= min_p * probability[0])
    probability = probability.where(kept, 0.0)
    return torch.zeros_like(probability).index_copy_(0, order, probability / probability.sum())


DISTRIBUTIONS: list[Settings] = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (2.5, 17, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.3, 30, 0.85, 0.03),
]


@pytest.mark.skipif(INTERPRETED, reason="thousands of rows are too many for the interpreter")
@pytest.mark.parametrize("implementation", SAMPLERS)
@pytest.mark.parametrize("settings", DISTRIBUTIONS)
def test_ids_are_distributed_as_the_definition_says(implementation, settings):
    rows, columns = (40_000, 5_000) if ON_GPU else (6_000, 100)
    logits = 2 * randn(columns, seed=21)
    logits[::3] = -INFINITY  # forbidden ones
    arguments = parameters([settings] * rows, seed=4)
    assert_distributed(implementation(logits.expand(rows, -1), *arguments), exact(logits, settings))


@pytest.mark.skipif(INTERPRETED, reason="thousands of rows are too many for the interpreter")
@pytest.mark.parametrize("implementation", SAMPLERS)
def test_ids_of_one_seed_are_distributed_over_positions(implementation):
    rows, settings = 6_000, (1.0, 0, 0.95, 0.0)
    logits = 1.5 * randn(64, seed=22)
    *by_row, _ = parameters([settings] * rows, seed=5)
    by_row[4] = by_row[4][:1].expand(rows).contiguous()
    positions = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    assert_distributed(implementation(logits.expand(rows, -1), *by_row, positions), exact(logits, settings))
