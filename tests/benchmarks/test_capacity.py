"""The answer of `benchmarks capacity` must be the smallest number of groups that meets the objectives."""

import pytest

from benchmarks.capacity import Fleet, Load, Objectives, _smallest, capacity, simulate

FLEET = Fleet(groups=1, gpu="h200", model="8b", tensor_parallel_size=1, max_num_seqs=16, max_step_tokens=512, delay_us=1_000)
LOAD = Load(rate=24.0, prompt_tokens=100, output_tokens=60)
OBJECTIVES = Objectives(ttft_s=0.3, tpot_s=0.02, share=0.9)


def test_more_groups_meet_more() -> None:
    loads = [simulate(FLEET, Load(rate, 100, 60), OBJECTIVES, 3.0) for rate in (8.0, 200.0)]
    assert loads[0].met > 0.9
    assert loads[0].ttft_s[0] < 0.1
    assert not loads[1].whole  # cut short: it could not meet them any more
    assert simulate(FLEET, Load(8.0, 100, 60), OBJECTIVES, 3.0) == loads[0]  # the same seed, the same run


def test_the_report_names_the_smallest_fleet() -> None:
    report = capacity(FLEET, LOAD, OBJECTIVES, 1.0)
    needed = int(str(report.raw["needed"]))
    met = {int(str(row[0])): float(str(row[1])) for row in report.rows}
    assert met[needed] >= 90
    assert all(share < 90 for groups, share in met.items() if groups < needed)
    assert needed == 1 or needed - 1 in met


@pytest.mark.parametrize("smallest", [1, 2, 19, 20, 21, 57, 200])
@pytest.mark.parametrize("guess", [1, 3, 20, 60, 150])
def test_the_search_finds_the_smallest_number(smallest: int, guess: int) -> None:
    tried: list[int] = []

    def meets(number: int) -> bool:
        tried.append(number)
        return number >= smallest

    assert _smallest(meets, guess) == smallest
    assert min(tried) >= 1
