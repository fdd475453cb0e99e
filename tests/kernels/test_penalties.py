import pytest
import torch
from torch import Tensor

from kernels.penalties import IDS, SHARES, penalise_torch
from kernels.sampling import sample
from tests.chi_square import assert_distributed
from tests.kernels.counted import IMPLEMENTATIONS, SLOTS, Operations, check_lists, count_of, int32s, recount_of, zeros
from tests.kernels.support import DEVICE, INTERPRETED, generator, randn

BIASES = 4
PENALTIES = [(0.0, 0.0, 1.0), (1.5, 0.0, 1.0), (0.0, -0.7, 1.0), (0.0, 0.0, 1.3), (-2.0, 0.25, 0.5), (0.3, 2.0, 1.0)]  # by slot


def unbiased() -> tuple[Tensor, Tensor]:
    return torch.full((SLOTS, BIASES), -1, dtype=torch.int32, device=DEVICE), torch.full((SLOTS, BIASES), torch.nan, device=DEVICE)


def settings() -> tuple[Tensor, Tensor, Tensor]:
    presence, frequency, repetition = torch.tensor(PENALTIES, device=DEVICE).T.contiguous()
    return presence, frequency, repetition


def expected_logits(logits: Tensor, prompt: list[int], output: list[int], slot: int, bias: dict[int, float], first: int) -> list[float]:
    """Token by token, in float64."""
    presence, frequency, repetition = PENALTIES[slot]
    values = []
    for token, logit in enumerate(logits.double().tolist(), first):
        logit += bias.get(token, 0.0)
        if token in prompt or token in output:
            logit = logit / repetition if logit > 0 else logit * repetition
        logit -= frequency * output.count(token)
        values.append(logit - presence if token in output else logit)
    return values


@pytest.mark.parametrize("operations", IMPLEMENTATIONS)
@pytest.mark.parametrize("columns, first", [(1, 0), (37, 0), (2500, 0), (129, 129), (64, 500)])
def test_penalties_equal_a_count_by_hand(operations: Operations, columns: int, first: int) -> None:
    random = generator(columns)
    held, (bias_ids, bias_values), penalties = zeros(SLOTS, columns), unbiased(), settings()
    sequences, biases = [], []
    for slot in range(SLOTS):
        ids = (torch.randint(first + columns + 5, (length,), generator=random, device=DEVICE).tolist() for length in (40, 60 * slot))
        prompt, output = ids
        recount_of(operations, held, slot, prompt, output[: 10 * slot], first)  # again, after a preemption
        for part in (slice(10 * slot, 30 * slot), slice(30 * slot, None)):
            count_of(operations, held, slot, output[part], first)
        sequences.append((prompt, output))
        used = torch.randperm(first + columns + 5, generator=random, device=DEVICE)[: slot % (BIASES + 1)]
        bias_ids[slot, : len(used)], bias_values[slot, : len(used)] = used.int(), randn(len(used), seed=slot)
        biases.append(dict(zip(used.tolist(), bias_values[slot].tolist(), strict=False)))
    check_lists(operations, held, *range(SLOTS))
    slots = int32s(3, 0, 5, 1, 4, 2, 3)
    logits = randn(len(slots), columns + 3, seed=columns)[:, :columns]  # as gathered from ranks, whose padding is cut off
    logits[:, columns // 2] = -torch.inf
    before = logits.clone()
    operations.penalise(logits, slots, held, *penalties, bias_ids, bias_values, first)
    for row, slot in enumerate(slots.tolist()):
        prompt, output = sequences[slot]
        expected = expected_logits(before[row], prompt, output, slot, biases[slot], first)
        torch.testing.assert_close(logits[row].double(), torch.tensor(expected, dtype=torch.float64, device=DEVICE), rtol=1e-5, atol=1e-5)
    assert torch.equal(logits[1], before[1])


@pytest.mark.parametrize("operations", IMPLEMENTATIONS)
def test_every_bit_is_the_references(operations: Operations) -> None:
    """Of rows with and without biases, some of them of ids that are held, with lists of many shares and of few."""
    columns, penalties, (bias_ids, bias_values) = 3 * SHARES * IDS, settings(), unbiased()
    held, random = zeros(SLOTS, columns, columns), generator(1)
    for slot in range(SLOTS):
        length = (0, 5, IDS, IDS + 1, SHARES * IDS - 50, 2 * SHARES * IDS)[slot]
        output = torch.randperm(columns, generator=random, device=DEVICE)[:length].tolist()
        recount_of(operations, held, slot, output[: length // 3], output[length // 3 :] + output[::3])
        if slot % 2:
            bias_ids[slot, 1:4] = int32s(output[0], output[-1], (output[0] + 1) % columns)
            bias_values[slot, 1:4] = randn(3, seed=slot)
    check_lists(operations, held, *range(SLOTS))
    slots = int32s(*range(SLOTS), 4, 5)
    logits = 7 * randn(len(slots), columns, seed=2)
    expected = logits.clone()
    penalise_torch(expected, slots, held, *penalties, bias_ids, bias_values)
    operations.penalise(logits, slots, held, *penalties, bias_ids, bias_values)
    assert torch.equal(logits.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("operations", IMPLEMENTATIONS)
def test_an_id_that_came_often_is_penalised_once_and_with_its_bias(operations: Operations) -> None:
    held, (bias_ids, bias_values), one = zeros(1, 5), unbiased(), torch.ones(1, device=DEVICE)
    recount_of(operations, held, 0, [3, 3, 4, 3], [3, 2, 3])
    count_of(operations, held, 0, [2, 3, 1, 2, 3])
    check_lists(operations, held, 0)
    bias_ids[0, 0], bias_values[0, 0] = 3, 1.0
    bias_ids[0, 2], bias_values[0, 2] = 0, -2.0
    logits = torch.tensor([[1.0, 2.0, -3.0, 8.0, 5.0]], device=DEVICE)
    operations.penalise(logits, int32s(0), held, one / 4, one / 2, 2 * one, bias_ids[:1], bias_values[:1])
    once = [1 - 2, 2 / 2 - 0.75, -3 * 2 - 3 * 0.5 - 0.25, (8 + 1) / 2 - 4 * 0.5 - 0.25, 5 / 2]
    assert logits.tolist() == [once]


@pytest.mark.parametrize("operations", IMPLEMENTATIONS)
def test_rows_that_ask_for_nothing_keep_their_bits(operations: Operations) -> None:
    held, (bias_ids, bias_values), penalties = zeros(SLOTS, 40), unbiased(), settings()
    recount_of(operations, held, 0, [1, 2, 3], [3, 4])  # neither penalties nor biases
    logits = randn(2, 40, seed=0)
    logits[:, 3], logits[:, 4], logits[0, 2] = -torch.inf, -0.0, torch.nan
    logits -= 0.0  # a NaN as this device makes it
    before = logits.clone()
    operations.penalise(logits, int32s(0, 4), held, *penalties, bias_ids, bias_values, 0)  # 4: penalties, and holds nothing
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("operations", IMPLEMENTATIONS)
def test_a_slot_keeps_nothing_of_the_sequence_before(operations: Operations) -> None:
    held, (bias_ids, bias_values), penalties = zeros(SLOTS, 50), unbiased(), settings()
    for slot, prompt, output in ((4, [*range(30)], [*range(10, 40)]), (4, [3], [45, 3]), (2, [3], [45, 3])):
        recount_of(operations, held, slot, prompt, output)
        count_of(operations, held, slot, [46, 46])
    assert held.counts[4].tolist() == held.counts[2].tolist()
    check_lists(operations, held, 2, 4)
    logits = randn(1, 50, seed=0)
    before = logits.clone()
    operations.penalise(logits, int32s(4), held, *penalties, bias_ids, bias_values)
    assert (logits != before).nonzero()[:, 1].tolist() == [3, 45, 46]


@pytest.mark.skipif(INTERPRETED, reason="thousands of rows are too many for the interpreter")
@pytest.mark.parametrize("operations", IMPLEMENTATIONS)
def test_ids_of_penalised_rows_are_distributed_as_the_definition_says(operations: Operations) -> None:
    rows, columns, slot, temperature = 40_000, 50, 4, 2.0
    held, (bias_ids, bias_values) = zeros(SLOTS, columns), unbiased()
    prompt, output, bias = [1, 2, 3, 4], [3, 3, 7, 9, 9, 9], {4: 1.5, 9: -2.0, 20: 1.0}
    recount_of(operations, held, slot, prompt, output)
    bias_ids[slot, : len(bias)], bias_values[slot, : len(bias)] = int32s(*bias), torch.tensor([*bias.values()], device=DEVICE)
    logits = randn(columns, seed=31)
    expected = torch.tensor(expected_logits(logits, prompt, output, slot, bias, 0), dtype=torch.float64)
    penalised = logits.repeat(rows, 1)
    operations.penalise(penalised, int32s(slot).expand(rows).contiguous(), held, *settings(), bias_ids, bias_values)
    temperatures, ones = torch.full((rows,), temperature, device=DEVICE), torch.ones(rows, device=DEVICE)
    seeds, positions = torch.arange(rows, device=DEVICE), torch.full((rows,), 10, dtype=torch.int32, device=DEVICE)
    ids = sample(penalised, temperatures, torch.zeros_like(positions), ones, 0 * ones, seeds, positions)
    assert_distributed(ids, (expected / temperature).softmax(dim=0))
