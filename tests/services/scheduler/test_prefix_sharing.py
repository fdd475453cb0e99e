"""What requests share, seen from a group whose device checks every page."""

from itertools import count
from random import Random
from typing import Any

import pytest

from benchmarks.lru import LruReplay
from services.scheduler.ends import FAILED, Finished
from services.scheduler.requests import Request
from shared.protocol.generation_pb2 import FINISH_REASON_STOP
from shared.protocol.plan import Limits
from tests.services.scheduler.device import Device, next_token
from tests.services.scheduler.test_group import Harness

PAGE_SIZE = 4
LIMITS = Limits(slots=8, pages=81, page_size=PAGE_SIZE, max_length=64, max_step_tokens=16, vocab_size=1000)
PROMPT = [*range(1, 31)]  # 7 whole pages and two tokens


class Sharing(Harness):
    """The next token depends on all before it, and the device checks what is read and written."""

    def __init__(self, limits: Limits = LIMITS, max_step_tokens: int = 16, overlap: bool = True, **options: Any) -> None:
        super().__init__(limits, max_step_tokens, overlap, **options)
        self.device = Device(limits, self.group.memory.pool, next_token)
        self.numbers = count(1_000)

    @property
    def prefilled(self) -> int:
        return sum(len(plan.prefill_ids) for plan in self.plans)

    def run(self, prompt: list[int], max_tokens: int = 3, **fields: object) -> Request:
        request = self.submit(next(self.numbers), prompt, max_tokens, ignore_eos=True, **fields)
        self.finish()
        return request


def test_a_burst_of_equal_prompts_computes_the_prefix_once() -> None:
    harness = Sharing()
    requests = [harness.submit(number, PROMPT, 3, ignore_eos=True) for number in range(8)]
    harness.finish()
    assert harness.prefilled == len(PROMPT) + 7 * (len(PROMPT) - 28)
    assert [request.cached_tokens for request in requests] == [0] + [28] * 7
    assert len({tuple(request.output) for request in requests}) == 1


def test_prompts_that_part_later_wait_only_for_what_they_share() -> None:
    harness = Sharing()
    harness.submit(0, PROMPT, 3)
    other = harness.submit(1, [*PROMPT[:10], 99, 98, 97], 3)
    harness.finish()
    assert other.cached_tokens == 8
    assert harness.prefilled == len(PROMPT) + 5


def test_who_waits_for_a_prefix_goes_on_when_its_writer_is_cancelled() -> None:
    harness = Sharing(overlap=False)
    writer, follower = harness.submit(0, PROMPT, 3), harness.submit(1, PROMPT, 3)
    assert follower.slot is None
    harness.group.end(writer, Finished(FINISH_REASON_STOP), 0.0)
    harness.finish()
    assert follower.end is not None
    assert follower.cached_tokens == 16  # the writer's one chunk


def test_a_full_hit_computes_one_token() -> None:
    harness = Sharing()
    harness.run(PROMPT[:28], max_tokens=9)
    before = harness.prefilled
    assert harness.run(PROMPT[:28]).cached_tokens == 24
    assert harness.prefilled == before + PAGE_SIZE  # whole pages, and the last token is never among them


def test_without_the_cache_everything_is_computed() -> None:
    harness = Sharing(prefix_cache=False)
    first, second = harness.run(PROMPT), harness.run(PROMPT)
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)
    assert harness.prefilled == 2 * len(PROMPT)
    assert first.output == second.output


def test_pfx_03_a_second_turn_reuses_the_first_answer() -> None:
    limits = Limits(slots=2, pages=100, page_size=1, max_length=64, max_step_tokens=16, vocab_size=1000)
    harness = Sharing(limits)
    first = harness.run(PROMPT[:10], max_tokens=12)
    second = harness.run([*PROMPT[:10], *first.output, 5, 6, 7])
    assert second.cached_tokens == 10 + 12 - 1  # the last token of the answer was never written


def test_pfx_03_of_an_answer_that_a_stop_string_ended_only_the_accepted_part_is_kept() -> None:
    limits = Limits(slots=2, pages=100, page_size=1, max_length=64, max_step_tokens=16, vocab_size=1000)
    harness = Sharing(limits)
    first = harness.submit(1, PROMPT[:10], 50, ignore_eos=True)
    while len(first.output) < 9:
        harness.step()
    first.accepted_tokens = 4
    harness.group.end(first, Finished(FINISH_REASON_STOP), 0.0)
    harness.finish()
    assert harness.run([*PROMPT[:10], *first.output[:9], 1]).cached_tokens == 10 + 4 - 1


def test_pfx_05_splitting_an_edge_in_use_and_running_out_of_pages() -> None:
    limits = Limits(slots=3, pages=14, page_size=2, max_length=24, max_step_tokens=16, vocab_size=1000)
    alone = Sharing(limits).run([1, 2, 3, 4, 5, 6, 7], max_tokens=12).output
    harness = Sharing(limits)
    first = harness.submit(1, [1, 2, 3, 4, 5, 6, 7], 12, ignore_eos=True)
    while not first.output:
        harness.step()
    harness.submit(2, [1, 2, 3, 4, 9, 8, 7], 2, ignore_eos=True)  # parts from the first in the middle of its edge
    harness.submit(3, [20, 21, 22, 23, 24, 25, 26, 27], 6, ignore_eos=True)  # fills what is left
    harness.finish()
    assert first.output == alone
    assert len(harness.ended) == 3
    assert harness.group.memory.free == limits.pages - 1


def test_pfx_07_requests_of_different_salts_share_nothing() -> None:
    harness = Sharing()
    assert [harness.run(PROMPT, cache_salt=salt).cached_tokens for salt in ("a", "b", "a", "")] == [0, 0, 28, 0]


@pytest.mark.parametrize("chunk", [0, 1])
def test_pfx_09_a_prefill_that_fails_leaves_nothing(chunk: int) -> None:
    harness = Sharing(overlap=False)
    request = harness.submit(1, PROMPT, 3)
    for _ in range(chunk):
        harness.step()
    assert request.slot is not None
    harness.results[0].ids[:] = -2  # in the middle of the prompt, and at its end
    harness.device.slots[request.slot].done = True
    harness.finish()
    assert request.end == FAILED
    assert harness.run(PROMPT).cached_tokens == 0


def test_pfx_09_who_used_what_failed_begins_again() -> None:
    harness = Sharing(overlap=False)
    writer = harness.submit(1, PROMPT, 30, ignore_eos=True)
    while not writer.output:
        harness.step()
    user = harness.submit(2, PROMPT, 10, ignore_eos=True)
    while len(user.output) < 3:
        harness.step()
    assert writer.slot is not None
    row = harness.plans[-1].row_slots.tolist().index(writer.slot)
    harness.results[0].ids[:, row] = -2
    harness.device.slots[writer.slot].done = True
    harness.finish()
    assert writer.end == FAILED
    assert user.preemptions == 1
    assert list(user.output) == list(Sharing(prefix_cache=False).run(PROMPT, max_tokens=10).output)


def test_a_preempted_request_loses_no_token_and_comes_on_by_a_page() -> None:
    harness = Sharing()
    expected = Sharing().run(PROMPT, max_tokens=20).output
    request = harness.submit(1, PROMPT, 20, ignore_eos=True)
    for preemptions in (1, 2, 3):
        had = request.length
        while request.length == had:
            harness.step()
        assert request.slot is not None
        harness.group.occupancy.preempt(request.slot)
        while request.preemptions < preemptions:
            harness.step()
        assert request.slot is not None  # it is back at once: nobody else is there
        assert harness.group.slots.target[request.slot] == request.length > had
        assert harness.group.slots.secure_until[request.slot] == request.length + PAGE_SIZE
    harness.finish()
    assert request.output == expected
    assert request.preemptions == 3
    assert request.cached_tokens == 0  # its own work is not a hit


def test_the_hit_rate_is_that_of_the_same_cache_replayed() -> None:
    """Conversations of several turns after a few system prompts, in a cache that holds a part of them: within 2 %."""
    limits = Limits(slots=4, pages=401, page_size=4, max_length=512, max_step_tokens=256, vocab_size=1000)
    harness, replayed, chance = Sharing(limits, max_step_tokens=256), LruReplay(380, 4), Random(1)
    harness.device.model = lambda ids, vocab_size: 7  # what is cached matters here, not the answers
    harness.device.pool = None
    systems = [[100 + number] * 40 for number in range(4)]
    conversations = [list(chance.choice(systems)) for _ in range(24)]
    prompt_tokens = hits = expected = 0
    for number in range(400):
        turn = conversations[min(int(chance.expovariate(0.2)), 23)]
        if len(turn) > 200:
            turn[:] = chance.choice(systems)
        turn += [chance.randint(200, 999) for _ in range(chance.randint(5, 20))]
        expected += replayed.open(turn)
        prompt_tokens += len(turn)
        request = harness.submit(number, list(turn), 8, ignore_eos=True)
        harness.finish()
        assert request.cached_tokens is not None
        hits += request.cached_tokens
        replayed.close(turn, [*turn, *request.output[:-1]])
        turn += list(request.output)
    print(f"hit rate {hits / prompt_tokens:.3f}, replayed {expected / prompt_tokens:.3f}")
    assert 0.3 < expected / prompt_tokens < 0.9
    assert hits / prompt_tokens == pytest.approx(expected / prompt_tokens, rel=0.02)
