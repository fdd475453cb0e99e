"""How many groups an arrival rate needs, so that enough of the requests meet their objectives: the scheduler on a virtual clock.

First the rate that one group sustains is found, which is quick; then as many groups as that asks for are simulated, and more or
fewer, until the smallest number is found that meets the objectives. A run stops as soon as too many requests have missed theirs.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from rich.progress import Progress

from benchmarks.report import Plot, Report, Series
from benchmarks.virtual_fleet import WARM_UP_SHARE, Fleet, Load, Objectives, Outcome, simulate

FIRST_RATE, LEAST_RATE, RATE_PRECISION = 4.0, 0.1, 0.05  # of the search for what one group sustains
LEAST_REQUESTS = 100  # of a run, that are counted


def capacity(fleet: Fleet, load: Load, objectives: Objectives, seconds: float) -> Report:
    """`fleet.groups` is what is sought. Raises ValueError when not even an idle group meets the objectives."""
    tried: dict[int, Outcome] = {}
    with Progress(transient=True) as progress:
        task = progress.add_task("one group", total=None)
        one = _sustained_rate(replace(fleet, groups=1), load, objectives, seconds)

        def meets(groups: int) -> bool:
            progress.update(task, description=f"{groups} groups")
            if groups not in tried:
                tried[groups] = simulate(replace(fleet, groups=groups), load, objectives, seconds)
            return tried[groups].met >= objectives.share

        needed = _smallest(meets, math.ceil(load.rate / one))
    return _report(fleet, load, objectives, seconds, one, needed, tried)


def _sustained_rate(fleet: Fleet, load: Load, objectives: Objectives, seconds: float) -> float:
    """Requests a second that one group serves within the objectives."""

    def meets(rate: float) -> bool:
        enough_s = LEAST_REQUESTS / rate / (1 - WARM_UP_SHARE)
        return simulate(fleet, replace(load, rate=rate), objectives, max(seconds, enough_s)).met >= objectives.share

    low = min(FIRST_RATE, load.rate)
    while not meets(low):
        low /= 2
        if low < LEAST_RATE:
            raise ValueError(f"a group with {low:g} requests/s does not meet the objectives: relax them, or take other GPUs")
    high = 2 * low
    while high < load.rate and meets(high):
        low, high = high, 2 * high
    while high - low > RATE_PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def _smallest(meets: Callable[[int], bool], guess: int) -> int:
    """The smallest number that meets, sought in steps of 5 % around a guess, then one by one within the last step."""
    number, step = guess, max(guess // 20, 1)
    while not meets(number):
        number += step
    low = number - 1 if step == 1 else number - step
    while low >= 1 and meets(low):
        number, low = low, low - step
    low = max(low, 0)  # which does not meet, or is no fleet
    while number - low > 1:
        middle = (low + number) // 2
        low, number = (low, middle) if meets(middle) else (middle, number)
    return number


def _report(fleet: Fleet, load: Load, objectives: Objectives, seconds: float, one: float, needed: int, tried: dict[int, Outcome]) -> Report:
    counts = sorted(tried)
    whole = [count for count in counts if tried[count].whole]
    return Report(
        name="capacity",
        columns=("groups", "met %", "TTFT p50 ms", "TTFT p95 ms", "TPOT p50 ms", "TPOT p95 ms", "busy %", "tok/s", "requests"),
        rows=[_row(count, tried[count]) for count in counts],
        notes=(
            f"{needed} groups are needed: {fleet.model} on {fleet.tensor_parallel_size} x {fleet.gpu}, {load.rate:g} requests/s of "
            f"{load.prompt_tokens} prompt and {load.output_tokens} completion tokens on average",
            f"objectives, for {objectives.share:.0%}: TTFT {objectives.ttft_s * 1e3:g} ms and then {objectives.tpot_s * 1e3:g} ms a token",
            f"each scheduler drives at most {fleet.groups_per_scheduler} groups; one of them is simulated, with its share of the requests",
            f"one group alone sustains {one:.2f} requests/s; runs of {seconds:g} s of virtual time; cut short when it was clear: met 0",
        ),
        plots=(
            Plot(
                f"{load.rate:g} requests/s: {needed} groups are needed",
                "groups",
                "requests that meet their objectives, %",
                [Series("met", whole, [tried[count].met * 100 for count in whole])],
            ),
            Plot(
                "Latency by the number of groups",
                "groups",
                "ms",
                [
                    Series("TTFT, 95th percentile", whole, [tried[count].ttft_s[1] * 1e3 for count in whole]),
                    Series("time per token, 95th percentile", whole, [tried[count].tpot_s[1] * 1e3 for count in whole]),
                ],
            ),
        ),
        raw={"needed": needed, "one_group_requests_per_s": one},
    )


def _row(groups: int, outcome: Outcome) -> tuple[int | float | None, ...]:
    if not outcome.whole:
        return (groups, 0.0, None, None, None, None, outcome.busy * 100, outcome.tokens_per_s, outcome.requests)
    times = (*outcome.ttft_s, *outcome.tpot_s)
    return (groups, outcome.met * 100, *(time_s * 1e3 for time_s in times), outcome.busy * 100, outcome.tokens_per_s, outcome.requests)
