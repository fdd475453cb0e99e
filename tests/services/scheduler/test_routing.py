"""Where a request goes: to what is cached of it, unless that is too busy; to any of equals."""

from collections import Counter
from dataclasses import replace
from typing import Any

from services.scheduler.routing import RUNNING_TOKENS, choose
from services.scheduler.scores import Scores
from shared.protocol.plan import Limits
from tests.services.scheduler.build import make_request
from tests.services.scheduler.test_group import Harness

LIMITS = Limits(slots=8, pages=400, page_size=4, max_length=512, max_step_tokens=64, vocab_size=1000)
PROMPT = [*range(1, 101)]


def harness(name: str, limits: Limits = LIMITS) -> Harness:
    made = Harness(limits, max_step_tokens=64)
    made.group.name = name
    return made


def chosen(*harnesses: Harness, number: int = 1_000, **fields: Any) -> str | None:
    request = make_request(number, PROMPT, 4, **fields)
    group = choose([each.group for each in harnesses], request)
    return group.name if group is not None else None


def run(each: Harness, prompt: list[int]) -> None:
    each.submit(1, prompt, 2)
    each.finish()


def test_a_request_goes_where_most_of_it_is_cached() -> None:
    one, two, three = harness("one"), harness("two"), harness("three")
    run(one, PROMPT[:40])
    run(two, PROMPT[:80])
    assert {chosen(one, two, three, number=number) for number in range(20)} == {"two"}


def test_but_not_to_a_group_that_is_busier_by_more_than_that() -> None:
    one, two = harness("one"), harness("two")
    run(one, PROMPT)
    for number in range(100 // RUNNING_TOKENS):
        one.submit(10 + number, [900 + number], 400, ignore_eos=True)
        one.step()
    assert chosen(one, two) == "one"
    one.submit(20, [950], 400, ignore_eos=True)
    one.step()
    assert chosen(one, two) == "two"


def test_prompts_that_wait_count_by_their_tokens() -> None:
    one, two = harness("one"), harness("two")
    one.submit(1, [5] * 300, 4)
    two.submit(1, [6] * 20, 4)
    two.submit(2, [7] * 20, 4)
    assert chosen(one, two) == "two"


def test_a_free_slot_is_worth_more_than_a_cached_prompt() -> None:
    one, two = harness("one", replace(LIMITS, slots=1)), harness("two")
    run(one, PROMPT)
    one.submit(2, [900], 400, ignore_eos=True)
    one.step()
    for number in range(3):
        two.submit(number, [910 + number], 400, ignore_eos=True)
        two.step()
    assert chosen(one, two) == "two"


def test_a_salt_is_a_tree_of_its_own_and_a_scored_prompt_finds_nothing() -> None:
    one, two = harness("one"), harness("two")
    run(one, PROMPT)
    for fields in ({"cache_salt": "mine"}, {"scores": Scores(prompt_length=len(PROMPT), top=None, prompt_top=0)}):
        assert {chosen(one, two, number=number, **fields) for number in range(20)} == {"one", "two"}


def test_equals_share_the_requests() -> None:
    harnesses = [harness(name) for name in "abcd"]
    found = Counter(chosen(*harnesses, number=number) for number in range(400))
    assert all(70 <= found[name] <= 130 for name in "abcd")


def test_who_fits_nowhere_goes_nowhere() -> None:
    small, large = harness("small", replace(LIMITS, pages=11)), harness("large")
    run(small, PROMPT[:20])
    assert chosen(small, large) == "large"
    assert chosen(small) is None
