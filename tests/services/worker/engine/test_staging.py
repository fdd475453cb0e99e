"""What steps with prefill are filled up to."""

import pytest

from services.worker.engine.staging import ALIGNED, PREFILL_ROWS, PREFILL_SIZES, aligned, prefill_shape


@pytest.mark.parametrize("max_length", [16, 100, 512, 40_960])
def test_prefill_is_filled_up_by_a_row_of_nobody_that_fits(max_length: int) -> None:
    shapes = set()
    for prefill_rows in (1, 2, 6, 7, 8, 15, 16, 17, 255, 256):
        for tokens in {*range(prefill_rows, 1100, 7), prefill_rows, 8191, 8192}:
            rows, size = prefill_shape(prefill_rows, tokens, max_length)
            assert rows > prefill_rows
            assert tokens <= size <= tokens + max_length
            assert size % ALIGNED == 0
            assert (rows == PREFILL_ROWS and size in PREFILL_SIZES) or (rows % ALIGNED == 0 and size == aligned(tokens))
            shapes.add(rows)
    assert len(shapes) <= 7  # kernels are compiled for the number of rows
