"""A load like that of a chat service: what it does to gaps between tokens, and what the prefix cache finds beside its replay."""

import pytest

from benchmarks.conversations import Measured, Setup, Traffic, converse, replayed_hit_rate
from benchmarks.lru import LruReplay

PAGES = 1_500  # hold a part of what is said
TRAFFIC = Traffic(30.0, systems=4, system_tokens=300, user_tokens=100, answer_tokens=60, think_s=1.0)


@pytest.fixture(scope="module")
def mixed() -> Measured:
    return converse(TRAFFIC, Setup("mixed", slots=32, pages=PAGES), seconds=8.0)


def test_the_hit_rate_is_that_of_the_same_cache_replayed_in_the_same_order(mixed: Measured) -> None:
    replayed = replayed_hit_rate(mixed.events, PAGES)
    unbounded = replayed_hit_rate(mixed.events, 1_000_000)
    print(f"hit rate {mixed.hit_rate:.4f}, replayed {replayed:.4f}, with room for all {unbounded:.4f}")
    assert mixed.hit_rate == pytest.approx(replayed, rel=0.02)
    assert replayed < unbounded - 0.05  # much was evicted


def test_gaps_between_tokens_stay_below_two_full_steps_and_not_so_with_prompts_first(mixed: Measured) -> None:
    other = converse(TRAFFIC, Setup("prefill-first", slots=32, pages=PAGES), seconds=8.0)
    assert len(mixed.full_steps_us) > 10
    assert mixed.gap_s(0.99) <= 2 * mixed.full_step_s
    assert other.gap_s(0.99) > 2 * other.full_step_s


def test_a_replay_evicts_the_ends_that_were_used_least_recently_and_nothing_in_use() -> None:
    cache = LruReplay(capacity=4, page_size=2)
    first, second, third = [1, 1, 2, 2, 3], [1, 1, 4, 4, 5], [9, 9, 8, 8, 7, 7]
    assert cache.open(first) == 0
    cache.close(first, first)
    assert cache.open(second) == 2
    assert cache.open(third) == 0  # six pages in all: the end of `first` goes, nobody uses it
    cache.close(third, third)
    cache.close(second, second)
    assert cache.open(second) == 4
    assert cache.open(first) == 2
