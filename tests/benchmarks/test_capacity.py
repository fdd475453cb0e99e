"""The answer of `benchmarks capacity` must be the smallest number of groups that meets the objectives."""

from dataclasses import replace

import pytest

from benchmarks.capacity import _smallest, capacity
from benchmarks.virtual_fleet import Fleet, Load, Objectives, Run, simulate

FLEET = Fleet(
    groups=1, groups_per_scheduler=4, gpu="h200", model="8b", tensor_parallel_size=1, max_num_seqs=16, max_step_tokens=512, delay_us=1_000
)
LOAD = Load(rate=24.0, prompt_tokens=100, output_tokens=60)
OBJECTIVES = Objectives(ttft_s=0.3, tpot_s=0.02, share=0.9)


def test_more_groups_meet_more() -> None:
    loads = [simulate(FLEET, Load(rate, 100, 60), OBJECTIVES, 3.0) for rate in (8.0, 200.0)]
    assert loads[0].met > 0.9
    assert loads[0].ttft_s[0] < 0.1
    assert not loads[1].whole  # cut short: it could not meet them any more
    assert simulate(FLEET, Load(8.0, 100, 60), OBJECTIVES, 3.0) == loads[0]  # the same seed, the same run


def test_of_several_schedulers_one_is_simulated_with_its_share_of_the_load() -> None:
    whole = simulate(replace(FLEET, groups=7), Load(70.0, 100, 60), OBJECTIVES, 2.0)  # behind two schedulers, of 3 and 4
    share = simulate(replace(FLEET, groups=3), Load(30.0, 100, 60), OBJECTIVES, 2.0)
    assert whole == replace(share, tokens_per_s=share.tokens_per_s * 7 / 3)


def test_a_run_does_not_wait_for_long_answers() -> None:
    """A request of 1,000 tokens is judged by what it has when the run ends."""
    run = Run(FLEET, Load(4.0, 100, 1_000), Objectives(ttft_s=0.5, tpot_s=0.02, share=0.5), 2.0)
    outcome = run.outcome(1.0)
    assert outcome.requests >= 3
    assert outcome.met == 1.0
    assert run._clock.now_s == 2.5


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
