"""plan_unpack against a loop over rows that follows the definition word by word."""

import pytest
import torch

from kernels.plan_unpack import plan_unpack_torch

PAGE = 4


@pytest.mark.parametrize(
    "decode_slots, chunks",
    [
        ([], [(0, 0, 1)]),
        ([3], []),
        ([3, 0, 1], [(2, 0, 5), (4, 8, 3), (5, 3, 1)]),
        ([1, 3], [(0, 4, 4)]),
    ],
)
def test_matches_a_loop_over_rows(decode_slots: list[int], chunks: list[tuple[int, int, int]]) -> None:
    generator = torch.Generator().manual_seed(1)
    page_table = torch.randint(1, 50, (6, 5), generator=generator, dtype=torch.int32)
    length = torch.tensor([7, 3, 0, 11, 0, 0], dtype=torch.int32)
    last_token = torch.arange(100, 106, dtype=torch.int32)
    done = torch.tensor([False, True, False, False, False, False])
    ids = torch.randint(0, 90, (sum(size for _, _, size in chunks),), generator=generator, dtype=torch.int32)

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
            expected[1].append(position)
            expected[2].append(int(page_table[slot, position // PAGE]) * PAGE + position % PAGE)
            at += 1
        expected[3].append(start + size)
        query_starts.append(at)

    slots, starts, sizes = torch.tensor(chunks, dtype=torch.int32).view(-1, 3).unbind(1)
    decode = torch.tensor(decode_slots, dtype=torch.int32)
    got = plan_unpack_torch(page_table, length, last_token, done, decode, slots, starts, sizes, ids, PAGE)
    assert [each.tolist() for each in got] == [*expected, query_starts]
    assert [each.dtype for each in got] == [torch.int32, torch.int32, torch.int64, torch.int32, torch.int32]


def test_addresses_pass_two_to_the_31() -> None:
    page_table = torch.full((1, 1), 2**27, dtype=torch.int32)
    zero, none = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    _, _, locations, _, _ = plan_unpack_torch(page_table, zero, zero, zero.bool(), zero, none, none, none, none, 64)
    assert locations.tolist() == [2**33]
