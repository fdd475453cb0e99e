"""What steps are filled up to."""

from itertools import pairwise

import pytest

from services.worker.engine.sizes import ALIGNED, SMALL, PrefillSizes, aligned, decode_sizes, launched_rows, prompt_sizes, sizes_beside


@pytest.mark.parametrize("most", [0, 100, 512, 2000, 16_384, 65_536])
def test_captured_prompts_are_few_and_waste_little(most: int) -> None:
    sizes = prompt_sizes(most)
    assert (sizes[-1] >= most and (len(sizes) == 1 or sizes[-2] < most)) if most else not sizes
    assert len(sizes) <= 8 + 8 * 7
    for smaller, larger in pairwise(sizes):
        assert smaller < larger <= (2 * smaller if larger <= SMALL[-1] else 1.125 * smaller)
        assert larger % ALIGNED == 0


@pytest.mark.parametrize("slots", [1, 3, 8, 64, 100, 256, 1000, 4096])
@pytest.mark.parametrize("tokens", [16, 192, 512, 1024, 4096, 16_384])
def test_decode_rows_beside_prompts_waste_little_too(tokens: int, slots: int) -> None:
    sizes = sizes_beside(tokens, slots)
    assert (sizes[0], sizes[-1]) == (0, slots)
    assert set(sizes[1:]) <= set(decode_sizes(slots))
    for smaller, larger in pairwise(sizes):
        assert smaller < larger <= smaller + max(tokens / 8, 3 * smaller if smaller < 22 else 64, smaller / 2, 4)


def test_all_that_a_large_worker_captures() -> None:
    captured = PrefillSizes(256, 16_384).captured
    assert sum(len(sizes_beside(size.tokens, 256)) for size in captured) < 160  # each takes some 50 ms at every start


@pytest.mark.parametrize("slots, most", [(8, 2048), (256, 16_384), (256, 0), (64, 1024), (1, 512)])
def test_prefill_is_filled_up_to_a_captured_size_or_to_one_of_few_that_are_launched(slots: int, most: int) -> None:
    sizes, rows = PrefillSizes(slots, most), set()
    for prefills in {count for count in (1, 2, 7, 15, 16, 31, 63, 64, 127, 255, 256) if count <= slots}:
        for tokens in {*range(prefills, 1100, 7), prefills, 8191, 16_384}:
            size = sizes.of(prefills, tokens)
            assert size.rows > prefills  # one is nobody's
            assert size.tokens >= tokens
            if size in sizes.captured:
                assert size.tokens <= max(2 * tokens, SMALL[-1])
            else:
                assert size == (launched_rows(prefills), aligned(tokens))
            rows.add(size.rows)
        if prefills < 16 and most:
            assert sizes.of(prefills, most) in sizes.captured
    assert rows <= {launched_rows(count) for count in range(1, slots + 1)}  # kernels are compiled for the number of rows
