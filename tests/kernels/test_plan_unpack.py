"""plan_unpack against a loop over rows that follows the definition word by word."""

import pytest
import torch

from kernels.plan_unpack import plan_unpack_torch, plan_unpack_triton
from tests.kernels.support import DEVICE, generator, implementations

PAGE = 4
IMPLEMENTATIONS = implementations(plan_unpack_torch, plan_unpack_triton)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "decode_slots, chunks",
    [
        ([], [(0, 0, 1)]),
        ([3], []),
        ([3, 0, 1], [(2, 0, 5), (4, 8, 3), (5, 3, 1)]),
        ([1, 3], [(0, 4, 4)]),
        ([3, 1, 1, 1], []),  # a captured batch that is filled up with a done slot
        ([3, 1], [(2, 0, 5), (1, 0, 300), (1, 0, 0)]),  # prefill too, with more tokens than the slot has positions
        ([0, 3] * 70, [(2, 0, 17), (4, 1, 1)] * 30),  # more of each than a program takes
    ],
)
def test_matches_a_loop_over_rows(implementation, decode_slots: list[int], chunks: list[tuple[int, int, int]]) -> None:
    page_table = torch.randint(1, 50, (6, 5), generator=generator(1), dtype=torch.int32, device=DEVICE)
    length = torch.tensor([7, 3, 0, 11, 0, 0], dtype=torch.int32, device=DEVICE)
    last_token = torch.arange(100, 106, dtype=torch.int32, device=DEVICE)
    done = torch.tensor([False, True, False, False, False, False], device=DEVICE)
    count = sum(size for _, _, size in chunks)
    ids = torch.randint(0, 90, (count,), generator=generator(2), dtype=torch.int32, device=DEVICE)

    expected: tuple[list[int], ...] = ([], [], [], [])
    for slot in decode_slots:
        position = int(length[slot])
        location = 0 if done[slot] else int(page_table[slot, position // PAGE]) * PAGE + position % PAGE
        for values, value in zip(expected, (int(last_token[slot]), position, location, 0 if done[slot] else position + 1), strict=True):
            values.append(value)
    query_starts, at = [0], 0
    for slot, start, size in chunks:
        for position in range(start, start + size):
            expected[0].append(int(ids[at]))
            expected[1].append(0 if done[slot] else position)
            expected[2].append(0 if done[slot] else int(page_table[slot, position // PAGE]) * PAGE + position % PAGE)
            at += 1
        expected[3].append(0 if done[slot] else start + size)
        query_starts.append(at)

    slots, starts, sizes = torch.tensor(chunks, dtype=torch.int32, device=DEVICE).view(-1, 3).T.contiguous()
    decode = torch.tensor(decode_slots, dtype=torch.int32, device=DEVICE)
    got = implementation(page_table, length, last_token, done, decode, slots, starts, sizes, ids, PAGE)
    assert [each.tolist() for each in got] == [*expected, query_starts]
    assert [each.dtype for each in got] == [torch.int32, torch.int32, torch.int64, torch.int32, torch.int32]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_addresses_pass_two_to_the_31(implementation) -> None:
    page_table = torch.full((1, 1), 2**27, dtype=torch.int32, device=DEVICE)
    zero, none = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    none = none[:0]
    _, _, locations, _, _ = implementation(page_table, zero, zero, zero.bool(), zero, none, none, none, none, 64)
    assert locations.tolist() == [2**33]
