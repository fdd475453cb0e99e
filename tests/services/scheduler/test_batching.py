"""Who is computed when: budgets, policies, and bounds on waiting, step by step on a group whose device answers at once."""

from dataclasses import replace
from random import Random

import pytest

from services.scheduler.admission import MAX_OVERTAKINGS, MAX_SKIPS, RETRY_PLANS
from services.scheduler.policy import POLICIES, PolicyName
from services.scheduler.radix import Prefix
from services.scheduler.requests import Request
from shared.protocol.plan import Int32s, Limits
from tests.services.scheduler.test_group import CANCELLED, Harness

LIMITS = Limits(slots=64, pages=2_001, page_size=4, max_length=512, max_step_tokens=32, vocab_size=1000)
BUDGET = 32


def group(policy: PolicyName = "mixed", limits: Limits = LIMITS) -> Harness:
    return Harness(limits, BUDGET, overlap=False, policy=policy)


def prompt(number: int, length: int) -> list[int]:
    """Nobody shares its beginning."""
    return [number % 900 + 1, *[3] * (length - 1)]


def steps_until(harness: Harness, *requests: Request) -> int:
    """Results that come before all of them have a token."""
    steps = 0
    while not all(request.output for request in requests):
        harness.step()
        steps += 1
        assert steps < 10_000
    return steps


def test_sch_01_who_can_never_fit_does_not_come_here_and_who_just_fits_ends() -> None:
    limits = replace(LIMITS, pages=17, slots=4)  # 64 tokens
    harness = group(limits=limits)
    assert harness.group.max_length == 65
    large = harness.submit(1, prompt(1, 40), 25, ignore_eos=True)
    others = [harness.submit(number, prompt(number, 10), 5) for number in range(2, 8)]
    harness.finish()
    assert len(large.output) == 25
    assert all(request.output for request in others)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", [BUDGET - 1, BUDGET, BUDGET + 1, 100])
def test_sch_05_a_step_keeps_to_its_budget_and_the_first_token_comes_after_the_last_chunk(policy: PolicyName, length: int) -> None:
    harness = group(policy)
    requests = [harness.submit(number, prompt(number, length), 9, ignore_eos=True) for number in range(5)]
    harness.finish()
    assert all(len(plan.decode_slots) + len(plan.prefill_ids) <= BUDGET for plan in harness.plans)
    assert sum(len(plan.prefill_ids) for plan in harness.plans) == 5 * length
    assert all(plan.prefill_lengths.sum() == len(plan.prefill_ids) for plan in harness.plans)
    assert [len(request.output) for request in requests] == [9] * 5


def test_sch_03_a_stream_has_a_token_in_every_step_while_long_prompts_arrive() -> None:
    harness = group()
    stream = harness.submit(0, prompt(0, 5), 300, ignore_eos=True)
    steps_until(harness, stream)
    newcomers = []
    for number in range(1, 31):
        newcomers.append(harness.submit(number, prompt(number, 300), 3, ignore_eos=True))
        for _ in range(5):
            before = len(stream.output)
            harness.step()
            assert len(stream.output) == before + 1
    while not stream.end:  # those whose prefill has just ended go on in the next step, too
        had = [len(request.output) for request in newcomers]
        for _ in range(2):
            if harness.results:
                harness.step()
        for request, before in zip(newcomers, had, strict=True):
            assert not before or request.end or len(request.output) > before


def test_prefill_first_pauses_streams_and_decode_first_does_not() -> None:
    gained = {}
    for policy in POLICIES:
        harness = group(policy)
        streams = [harness.submit(number, prompt(number, 2), 200, ignore_eos=True) for number in range(BUDGET)]
        steps_until(harness, *streams)
        newcomer = harness.submit(100, prompt(100, 100), 5)
        before = sum(len(stream.output) for stream in streams)
        for _ in range(6):
            harness.step()
        gained[policy] = (sum(len(stream.output) for stream in streams) - before, bool(newcomer.output))
    assert gained["prefill-first"][1]
    assert gained["decode-first"] == (6 * BUDGET, False)
    assert gained["prefill-first"][0] < gained["mixed"][0] < gained["decode-first"][0]


def test_a_short_prompt_does_not_wait_behind_long_ones() -> None:
    harness = group()
    for number in range(10):
        harness.submit(number, prompt(number, 400), 3)
    short = harness.submit(100, prompt(100, 20), 3)
    assert steps_until(harness, short) <= 1 + -(-2 * 20 // BUDGET) + 1  # what is on its way, its own chunks, its token


def test_a_long_prompt_is_not_stalled_by_short_ones() -> None:
    harness = group()
    long = harness.submit(0, prompt(0, 400), 3)
    steps = 0
    while not long.output:
        harness.submit(1 + steps, prompt(1 + steps, 30), 1)
        harness.step()
        steps += 1
    assert steps <= -(-2 * 400 // BUDGET) + 2


def test_a_large_request_is_passed_over_only_so_often() -> None:
    harness = group(limits=replace(LIMITS, pages=121, slots=4, max_length=512))
    for number in range(3):
        harness.submit(number, prompt(number, 60), 60, ignore_eos=True)
    large = harness.submit(100, prompt(100, 400), 3)
    number = 1_000
    while not large.output:
        number += 1
        harness.submit(number, prompt(number, 60), 60, ignore_eos=True)
        harness.step()
        assert number < 3_000
    admitted_before = sum(request.admitted_at is not None for request in harness.ended) + harness.group.num_running - 4
    assert large.skips <= MAX_SKIPS
    assert admitted_before <= MAX_SKIPS + 4


def test_who_does_not_fit_is_looked_at_again_only_now_and_then() -> None:
    harness = group(limits=replace(LIMITS, pages=31))
    stream = harness.submit(0, prompt(0, 8), 100, ignore_eos=True)
    steps_until(harness, stream)
    large = harness.submit(1, prompt(1, 110), 3)
    cache, looks = harness.group.memory.cache, 0
    lookup = cache.lookup

    def counted(namespace: str, ids: Int32s, confirmed_only: bool = False) -> Prefix:
        nonlocal looks
        looks += 1
        return lookup(namespace, ids, confirmed_only)

    cache.lookup = counted  # type: ignore[method-assign]
    for _ in range(4 * RETRY_PLANS):
        harness.step()
    assert large.slot is None
    assert 3 <= looks <= 5
    harness.finish()
    assert large.output


def test_higher_priority_goes_first() -> None:
    harness = group(limits=replace(LIMITS, slots=1))
    harness.submit(0, prompt(0, 4), 3)
    low, high = harness.submit(1, prompt(1, 4), 3), harness.submit(2, prompt(2, 4), 3, priority=1)
    harness.finish()
    assert harness.ended.index(high) < harness.ended.index(low)


@pytest.mark.parametrize("length", [4, 60])  # a short prompt, and one that takes several steps
def test_lower_priorities_are_overtaken_only_so_often_in_a_row(length: int) -> None:
    harness = group(limits=replace(LIMITS, slots=2))
    harness.submit(0, prompt(0, 4), 3, priority=1)
    low = [harness.submit(number, prompt(number, length), 3, priority=0, arrived_at=float(number)) for number in range(1, 4)]
    number = 100
    while not all(request.end for request in low):
        harness.submit(number, prompt(number, 4), 3, priority=5, arrived_at=float(number))
        harness.step()
        number += 1
        assert number < 1_000
    admitted = [int(seed) for plan in harness.plans for seed in plan.admissions["seed_low"]]  # a request's seed is its number
    places = [admitted.index(number) for number in (1, 2, 3)]
    assert places == sorted(places)  # in their order
    assert places[0] >= 10  # higher priorities do go first
    assert all(place <= (MAX_OVERTAKINGS + 1) * turn for turn, place in enumerate(places, 1))


def test_tenants_get_equal_shares_whatever_they_ask_for() -> None:
    harness = group(limits=replace(LIMITS, slots=2))
    greedy = [harness.submit(number, prompt(number, 30), 20, tenant="greedy", ignore_eos=True) for number in range(60)]
    modest = [harness.submit(100 + number, prompt(100 + number, 30), 20, tenant="modest", ignore_eos=True) for number in range(10)]
    while not all(request.end for request in modest):
        harness.step()
    ended = sum(request.end is not None for request in greedy)
    assert 8 <= ended <= 12


def test_who_was_away_has_no_credit() -> None:
    harness = group(limits=replace(LIMITS, slots=1))
    steady = [harness.submit(number, prompt(number, 30), 10, tenant="steady", ignore_eos=True) for number in range(20)]
    while sum(request.end is not None for request in steady) < 10:
        harness.step()
    late = [harness.submit(100 + number, prompt(100 + number, 30), 10, tenant="late", ignore_eos=True) for number in range(10)]
    harness.finish()
    order = [request for request in harness.ended if request in late or request in steady[11:]]
    assert 4 <= sum(request in late for request in order[:10]) <= 6


def test_the_tenant_that_has_had_most_gives_way_its_youngest_first() -> None:
    harness = group(limits=replace(LIMITS, pages=31, slots=4))
    old, young = (
        harness.submit(number, prompt(number, 20), 60, tenant="most", ignore_eos=True, arrived_at=float(number)) for number in (1, 2)
    )
    other = harness.submit(3, prompt(3, 20), 60, tenant="least", ignore_eos=True, arrived_at=3.0)
    while not any(request.preemptions for request in (old, young, other)):
        harness.step()
    assert (old.preemptions, young.preemptions, other.preemptions) == (0, 1, 0)
    harness.finish()
    assert old.preemptions == 0  # the oldest of all never gives way
    assert [len(request.output) for request in (old, young, other)] == [60] * 3


def test_sch_08_nothing_is_lost_in_a_small_pool() -> None:
    chance = Random(8)
    harness = Harness(replace(LIMITS, pages=61, slots=8), BUDGET, jump=True, bursts=True)
    requests = []
    for number in range(300):
        length = chance.randint(1, 120)
        request = harness.submit(
            number, prompt(chance.randint(0, 20), length), chance.randint(1, 120), ignore_eos=True,
            stop_ids=(), tenant=chance.choice("abc"), priority=chance.randint(0, 1),
        )  # fmt: skip
        requests.append(request)
        for _ in range(chance.randint(0, 6)):
            if harness.results:
                harness.step()
        if chance.random() < 0.1:
            victim = chance.choice(requests)
            if victim.end is None:
                harness.group.end(victim, CANCELLED, 0.0)
    harness.finish()
    assert all(request.end is not None for request in requests)
    assert len(harness.ended) == 300
    assert harness.group.memory.free == 60
