"""What runs before the first plan: each way to sample, with each number of rows that has kernels of its own."""

from itertools import product

import pytest
import torch
from torch import Tensor

from kernels.launch import next_power_of_2
from services.worker.engine.features import Feature, variants
from services.worker.engine.rehearsal import Rehearsal
from services.worker.engine.sections import Sections
from services.worker.engine.sizes import PrefillSizes, aligned, decode_sizes, sizes_beside

STEP_TOKENS = 8192


def rows_of_steps(slots: int) -> set[int]:
    """Of all that may be captured or launched, however much is worth capturing."""
    rows = set(decode_sizes(slots))
    for captured in (0, 512, STEP_TOKENS):
        sizes = PrefillSizes(slots, captured)
        rows |= {size.rows + beside for size in sizes.captured for beside in sizes_beside(size.tokens, slots)}
        for prefills, tokens in product(range(1, slots + 1), (1, 100, 600, 3000, STEP_TOKENS)):
            filled = sizes.of(prefills, max(tokens, prefills)).rows
            rows |= {filled + aligned(decodes) for decodes in range(slots - prefills + 1)}
    return rows


@pytest.mark.parametrize("slots", [1, 16, 32, 40, 64, 200])
def test_every_way_to_sample_runs_with_every_number_of_rows_that_tables_tell_apart(slots: int) -> None:
    run = set[tuple[int, Feature]]()

    def step(sections: Sections, max_query: int, features: Feature) -> Tensor:
        run.add((len(sections["decode_slots"]) + len(sections["prefill_slots"]), features))
        return torch.zeros(0)

    ways = variants(apart=True)
    Rehearsal(step, ways, slots, slots, 128, torch.device("cpu")).compile(lambda phase, part: None)
    most = max(rows for rows, _ in run)
    for rows in rows_of_steps(slots):
        assert rows <= most
        for features in ways:
            assert (min(next_power_of_2(rows), most), features) in run, f"{rows} rows, {features}"
