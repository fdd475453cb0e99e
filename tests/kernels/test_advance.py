"""advance and forbid_early_end against loops over rows that follow the definitions word by word."""

import pytest
import torch
from torch import Tensor

from kernels.advance import advance_torch, advance_triton
from kernels.early_end import forbid_early_end_torch, forbid_early_end_triton
from tests.kernels.support import DEVICE, generator, implementations, randn

SLOTS, STOP_IDS = 40, 16


def integers(low: int, high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator(seed), dtype=torch.int32, device=DEVICE)


def bools(*shape: int, seed: int) -> Tensor:
    return integers(0, 2, *shape, seed=seed).bool()


@pytest.mark.parametrize("implementation", implementations(advance_torch, advance_triton))
@pytest.mark.parametrize("rows", [0, 1, 17, 37])
@pytest.mark.parametrize("eos", [[], [3], [3, 9, 4]])
def test_advance_matches_a_loop_over_rows(implementation, rows, eos):
    length, last_token = integers(0, 30, SLOTS, seed=1), integers(0, 20, SLOTS, seed=2)
    done, ignore_eos = bools(SLOTS, seed=3), bools(SLOTS, seed=4)
    max_length, stop_ids = integers(10, 60, SLOTS, seed=5), integers(-1, 20, SLOTS, STOP_IDS, seed=6)
    stop_ids[::2] = -1
    slots = torch.randperm(SLOTS, generator=generator(7), device=DEVICE)[:rows].int()
    lengths, tokens, samples = integers(1, 30, rows, seed=8), integers(-2, 20, rows, seed=9), bools(rows, seed=10)
    tokens[tokens == -1] = 5
    if rows > 20:  # a captured batch that is filled up with a done slot
        slots[-3:], lengths[-3:] = slots[0], 0
        done[slots[0].long()] = True

    after, expected = [each.tolist() for each in (length, last_token, done)], []
    for row, slot in enumerate(slots.tolist()):
        token, now = int(tokens[row]), int(lengths[row])
        if done[slot]:
            expected.append(-1)
            continue
        after[0][slot] = now
        if token < 0:
            after[2][slot] = True
        elif samples[row]:
            after[1][slot] = token
            after[2][slot] = (token in eos and not ignore_eos[slot]) or token in stop_ids[slot].tolist() or now + 1 >= max_length[slot]
        expected.append(token if token < 0 or samples[row] else -1)

    eos_ids = torch.tensor(eos, dtype=torch.int32, device=DEVICE)
    ids = implementation(length, last_token, done, max_length, ignore_eos, stop_ids, eos_ids, slots, lengths, tokens, samples)
    assert ids.dtype == torch.int32
    assert ids.tolist() == expected
    assert [each.tolist() for each in (length, last_token, done)] == after


@pytest.mark.parametrize("implementation", implementations(forbid_early_end_torch, forbid_early_end_triton))
@pytest.mark.parametrize("first", [0, 8, 50])
def test_only_rows_below_their_least_length_lose_the_ids_that_end_them(implementation, first):
    columns, rows, eos = 30, 12, [3, 40, 9]
    min_length, lengths = integers(0, 20, SLOTS, seed=1), integers(0, 20, rows, seed=2)
    ignore_eos, stop_ids = bools(SLOTS, seed=3), integers(0, 60, SLOTS, STOP_IDS, seed=4)
    stop_ids[:, ::3] = -1
    slots = torch.randperm(SLOTS, generator=generator(5), device=DEVICE)[:rows].int()
    logits = randn(rows, columns, seed=6)
    logits[:, 1] = torch.nan

    expected = logits.clone()
    for row, slot in enumerate(slots.tolist()):
        ends = {each for each in stop_ids[slot].tolist() if each >= 0} | (set() if ignore_eos[slot] else set(eos))
        if lengths[row] < min_length[slot]:
            for column in (each - first for each in ends):
                if 0 <= column < columns and column != 1:
                    expected[row, column] = -torch.inf

    eos_ids = torch.tensor(eos, dtype=torch.int32, device=DEVICE)
    implementation(logits, min_length, ignore_eos, stop_ids, eos_ids, slots, lengths, first)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)
