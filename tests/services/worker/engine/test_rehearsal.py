"""What runs before the first plan: each way to sample, with each number of rows that has kernels of its own."""

import pytest
import torch
from torch import Tensor

from kernels.launch import next_power_of_2
from services.worker.engine.features import Feature, variants
from services.worker.engine.rehearsal import Rehearsal
from services.worker.engine.sections import Sections
from services.worker.engine.sizes import most_rows


@pytest.mark.parametrize("slots", [1, 40, 256])
def test_every_way_to_sample_runs_with_every_number_of_rows_that_tables_tell_apart(slots: int) -> None:
    run = set[tuple[int, Feature]]()

    def step(sections: Sections, max_query: int, features: Feature) -> Tensor:
        run.add((len(sections["decode_slots"]) + len(sections["prefill_slots"]), features))
        return torch.zeros(0)

    ways = variants(apart=True)
    Rehearsal(step, ways, slots, slots, 128, torch.device("cpu")).compile(lambda phase, part: None)
    most = most_rows(slots)
    for rows in range(1, most + 1):
        for features in ways:
            assert (min(next_power_of_2(rows), most), features) in run, f"{rows} rows, {features}"
