import pytest
import torch
from torch import Tensor

from kernels.penalties import (
    IDS,
    IN_PROMPT,
    SHARES,
    count_torch,
    count_triton,
    penalise_torch,
    penalise_triton,
    recount_torch,
    recount_triton,
)
from tests.kernels.support import DEVICE, generator, implementations, randn

SLOTS, BIASES = 6, 4
PENALTIES = [(0.0, 0.0, 1.0), (1.5, 0.0, 1.0), (0.0, -0.7, 1.0), (0.0, 0.0, 1.3), (-2.0, 0.25, 0.5), (0.3, 2.0, 1.0)]  # by slot

PAIRS = list(zip(implementations(penalise_torch, penalise_triton), implementations(count_torch, count_triton), strict=True))


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


@pytest.mark.parametrize("penalise, count", PAIRS)
@pytest.mark.parametrize("columns, first", [(1, 0), (37, 0), (2500, 0), (129, 129), (64, 500)])
def test_penalties_equal_a_count_by_hand(penalise, count, columns: int, first: int) -> None:
    random = generator(columns)
    counts = torch.zeros(SLOTS, columns, dtype=torch.int32, device=DEVICE)
    bias_ids = torch.full((SLOTS, BIASES), -1, dtype=torch.int32, device=DEVICE)
    bias_values = torch.full((SLOTS, BIASES), torch.nan, device=DEVICE)  # of no account where there is no id
    sequences, biases = [], []
    for slot in range(SLOTS):
        prompt, output = (torch.randint(first + columns + 5, (length,), generator=random, device=DEVICE) for length in (40, 60 * slot))
        ids = torch.cat((prompt, output))
        in_prompt = torch.arange(len(ids), device=DEVICE) < len(prompt)
        for part in (slice(0, 30), slice(30, None)):  # chunks of a prefill
            count(counts, torch.full_like(ids[part], slot), ids[part].int(), in_prompt[part], first)
        sequences.append((prompt.tolist(), output.tolist()))
        used = torch.randperm(first + columns + 5, generator=random, device=DEVICE)[: slot % (BIASES + 1)]
        bias_ids[slot, : len(used)], bias_values[slot, : len(used)] = used.int(), randn(len(used), seed=slot)
        biases.append(dict(zip(used.tolist(), bias_values[slot].tolist(), strict=False)))
    slots = torch.tensor([3, 0, 5, 1, 4, 2, 3], dtype=torch.int32, device=DEVICE)
    logits = randn(len(slots), columns + 3, seed=columns)[:, :columns]  # as gathered from ranks, whose padding is cut off
    logits[:, columns // 2] = -torch.inf
    before = logits.clone()
    presence, frequency, repetition = torch.tensor(PENALTIES, device=DEVICE).T.contiguous()
    penalise(logits, slots, counts, presence, frequency, repetition, bias_ids, bias_values, first)
    for row, slot in enumerate(slots.tolist()):
        prompt, output = sequences[slot]
        expected = expected_logits(before[row], prompt, output, slot, biases[slot], first)
        torch.testing.assert_close(logits[row].double(), torch.tensor(expected, dtype=torch.float64, device=DEVICE), rtol=1e-5, atol=1e-5)
    assert torch.equal(logits[1], before[1])


@pytest.mark.parametrize("count", [count for _, count in PAIRS])
def test_only_ids_of_these_columns_are_counted(count) -> None:
    counts = torch.zeros(2, 4, dtype=torch.int32, device=DEVICE)
    ids = torch.tensor([-1, -2, 3, 4, 7, 8, 4, 4, 4], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([0, 1, 0, 1, 1, 0, 1, 1, 0], dtype=torch.int32, device=DEVICE)
    in_prompt = torch.tensor([0, 0, 0, 1, 0, 1, 0, 0, 0], dtype=torch.bool, device=DEVICE)
    count(counts, slots, ids, in_prompt, first=4)
    assert counts.tolist() == [[1, 0, 0, 0], [IN_PROMPT + 2, 0, 0, 1]]


@pytest.mark.parametrize("recount", implementations(recount_torch, recount_triton))
@pytest.mark.parametrize("first, columns", [(0, 300), (128, 129)])
def test_counts_are_made_anew_of_the_rows_that_start_to_yield(recount, first: int, columns: int) -> None:
    page_size, max_pages, random = 16, 2 * SHARES * IDS // 16, generator(first)
    token_ids = torch.randint(0, 300, (SLOTS * max_pages * page_size,), generator=random, dtype=torch.int32, device=DEVICE)
    page_table = torch.randperm(SLOTS * max_pages, generator=random, device=DEVICE).int().view(SLOTS, max_pages)
    counts = torch.full((SLOTS, columns), 77, dtype=torch.int32, device=DEVICE)
    counted = torch.tensor([True, True, False, True, True, True], device=DEVICE)
    prompt_length = torch.tensor([0, 1, 5, 30, SHARES * IDS, 700], dtype=torch.int32, device=DEVICE)
    rows = [(4, SHARES * IDS + 300, True), (2, 9, True), (3, 17, True), (0, 5, False), (5, 700, True), (1, 0, True)]  # slot, length, yields
    slots, lengths, yields = (torch.tensor(column, device=DEVICE) for column in zip(*rows, strict=True))
    recount(counts, counted, slots.int(), lengths.int(), yields, prompt_length, token_ids, page_table, page_size, first)
    for slot, length, yielded in rows:
        expected = [77] * columns if not (yielded and counted[slot]) else [0] * columns
        if yielded and counted[slot]:
            pages = page_table[slot].tolist()
            for position in range(length):
                column = int(token_ids[pages[position // page_size] * page_size + position % page_size]) - first
                if 0 <= column < columns:
                    expected[column] = expected[column] | IN_PROMPT if position < prompt_length[slot] else expected[column] + 1
        assert counts[slot].tolist() == expected
