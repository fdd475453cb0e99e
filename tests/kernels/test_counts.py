import pytest
import torch

from kernels.counts import IDS, IN_PROMPT, SHARES, Held
from tests.kernels.counted import IMPLEMENTATIONS, SLOTS, Operations, bools, check_lists, count_of, int32s, recount_of, zeros
from tests.kernels.support import DEVICE, generator


@pytest.mark.parametrize("operations", IMPLEMENTATIONS)
def test_only_ids_of_these_columns_and_of_slots_that_are_counted_are_counted(operations: Operations) -> None:
    held = zeros(3, 4)
    recount_of(operations, held, 1, [4, 3, 8, -1], [], first=4)
    ids, slots = int32s(-1, -2, 3, 4, 7, 8, 4, 4, 4, 5), int32s(0, 1, 0, 1, 1, 0, 1, 1, 0, 2)
    operations.count(held, bools(True, True, False), slots, ids, first=4)
    assert held.counts.tolist() == [[1, 0, 0, 0], [IN_PROMPT + 3, 0, 0, 1], [0, 0, 0, 0]]
    check_lists(operations, held, 0, 1, 2)


@pytest.mark.parametrize("operations", IMPLEMENTATIONS)
def test_a_list_has_room_for_all_that_a_sequence_can_hold(operations: Operations) -> None:
    """Whether that is every column, or fewer ids than there are; the slots beside it keep theirs."""
    for columns, tokens in ((9, 100), (100, 9)):
        held = zeros(3, columns, tokens)
        assert held.listed.shape == (3, 9)
        for slot, ids in enumerate(([8], [0, 1, 2, 3, 4], [1, 7])):
            recount_of(operations, held, slot, ids[:1], ids[1:])
        count_of(operations, held, 1, [8, 7, 6, 5, 5, 8])
        assert held.counts.count_nonzero(1).tolist() == [1, 9, 2]
        check_lists(operations, held, 0, 1, 2)


@pytest.mark.parametrize("operations", IMPLEMENTATIONS)
@pytest.mark.parametrize("first, columns", [(0, 300), (128, 129)])
def test_counts_are_made_anew_of_the_rows_that_start_to_yield(operations: Operations, first: int, columns: int) -> None:
    page_size, max_pages, random = 16, 2 * SHARES * IDS // 16, generator(first)
    token_ids = torch.randint(0, 300, (SLOTS * max_pages * page_size,), generator=random, dtype=torch.int32, device=DEVICE)
    page_table = torch.randperm(SLOTS * max_pages, generator=random, device=DEVICE).int().view(SLOTS, max_pages)
    everything = torch.arange(columns, dtype=torch.int32, device=DEVICE)
    counts, distinct = torch.full((SLOTS, columns), 77, dtype=torch.int32, device=DEVICE), int32s(*[columns] * SLOTS)
    held = Held(counts, everything.repeat(SLOTS, 1), distinct)
    counted = torch.tensor([True, True, False, True, True, True], device=DEVICE)
    prompt_length = torch.tensor([0, 1, 5, 30, SHARES * IDS, 700], dtype=torch.int32, device=DEVICE)
    rows = [(4, SHARES * IDS + 300, True), (2, 9, True), (3, 17, True), (0, 5, False), (5, 700, True), (1, 0, True)]  # slot, length, yields
    slots, lengths, yields = (torch.tensor(column, device=DEVICE) for column in zip(*rows, strict=True))
    operations.recount(held, counted, slots.int(), lengths.int(), yields, prompt_length, token_ids, page_table, page_size, first)
    check_lists(operations, held, *range(SLOTS))
    for slot, length, yielded in rows:
        expected = [77] * columns if not (yielded and counted[slot]) else [0] * columns
        if yielded and counted[slot]:
            pages = page_table[slot].tolist()
            for position in range(length):
                column = int(token_ids[pages[position // page_size] * page_size + position % page_size]) - first
                if 0 <= column < columns:
                    expected[column] = expected[column] | IN_PROMPT if position < prompt_length[slot] else expected[column] + 1
        assert counts[slot].tolist() == expected
