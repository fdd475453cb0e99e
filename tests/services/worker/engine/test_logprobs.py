"""Log-probabilities, from the engine through the scheduler's group, against transformers: cold and warm, chunked, preempted, moved."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.driver import spec
from services.scheduler.requests import Request
from services.worker.engine.engine import TorchEngine
from services.worker.engine.logprobs import of_all, of_columns
from shared.protocol.logprobs import MAX_TOP_LOGPROBS, NO_TOP_ID
from tests.services.joined import Joined, completion_scores, sampled, scored_request
from tests.services.scheduler.build import make_request
from tests.services.worker.engine.test_sampling import on_ranks
from tests.tiny import tiny_model

TOLERANCE = 1e-3
SAME = 1e-4  # what batches and chunks may change
PAGE_SIZE = 4
K = MAX_TOP_LOGPROBS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(model: Path) -> TorchEngine:
    return TorchEngine(spec(model, page_size=PAGE_SIZE, num_pages=400), lambda phase, part: None)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def prompts(count: int, longest: int = 100) -> Iterator[list[int]]:
    """Of many lengths, that share prefixes of many lengths."""
    random = np.random.default_rng(count)
    known: list[list[int]] = [[]]
    for _ in range(count):
        before = known[random.integers(len(known))]
        prompt = before[: random.integers(len(before) + 1)] + random.integers(3, 300, random.integers(1, 30)).tolist()
        known.append(prompt[:longest])
        yield known[-1]


def expected(reference: Any, request: Request) -> torch.Tensor:
    """Log-probabilities of every id at every place but the first `[tokens - 1, V]`, prompt and completion."""
    ids = torch.tensor([[*request.prompt_ids.tolist(), *request.output]])
    return torch.log_softmax(reference(ids).logits[0, :-1].double(), dim=-1)


def check(reference: Any, request: Request) -> None:
    values, scores = expected(reference, request), request.scores
    assert scores is not None
    records = np.concatenate((scores.prompt, completion_scores(request)))
    ids = torch.tensor([*request.prompt_ids.tolist(), *request.output])
    first = 1 if scores.prompt_top is not None else len(request.prompt_ids)
    last = len(ids) if scores.top is not None else len(request.prompt_ids)
    assert records["position"].tolist() == list(range(first, last))
    places = torch.arange(first, last)
    torch.testing.assert_close(torch.tensor(records["logprob"]).double(), values[places - 1, ids[places]], rtol=0, atol=TOLERANCE)
    tops = torch.tensor(records["top_logprobs"]).double()
    torch.testing.assert_close(tops, values[places - 1].topk(K).values, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(tops, values[places - 1].gather(1, torch.tensor(records["top_ids"]).long()), rtol=0, atol=TOLERANCE)
    assert (records["logprob"] <= 1e-6).all()


def requests_of(count: int, **options: Any) -> list[Request]:
    """Every third wants its prompt scored; sampled in several ways, of which the log-probabilities must not depend."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0.7, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3, "biases": ((7, 3.0), (11, -100.0))},
    ]
    return [
        scored_request(number, prompt, 6, prompt_top=None if number % 3 else 5, **ways[number % len(ways)], **options)
        for number, prompt in enumerate(prompts(count))
    ]


def test_logprobs_and_prompt_scores_equal_transformers_cold_and_warm(engine: TorchEngine, reference: Any) -> None:
    joined = Joined(engine, PAGE_SIZE, max_step_tokens=24)
    for _ in range(2):
        requests = requests_of(50)
        joined.submit(*requests)
        joined.run(*requests)
        for request in requests:
            check(reference, request)
    assert sum(request.cached_tokens or 0 for request in requests) > 300
    assert all(not request.cached_tokens for request in requests[::3])  # what is scored is computed
    assert any(plan.iterations > 1 for plan in joined.plans)


def test_pfx_01_the_cache_changes_neither_tokens_nor_logprobs(engine: TorchEngine) -> None:
    def conversations(prefix_cache: bool) -> list[Request]:
        """Two turns of each, in another order each time, eight at once."""
        joined, order = Joined(engine, PAGE_SIZE, max_step_tokens=40, prefix_cache=prefix_cache), np.random.default_rng(prefix_cache)
        requests = [scored_request(number, prompt, 5) for number, prompt in enumerate(prompts(40))]
        for some in np.split(order.permutation(40), 5):
            joined.submit(*(requests[number] for number in some))
            joined.run(*(requests[number] for number in some))
        turns = [scored_request(100 + each.key.request, [*each.prompt_ids.tolist(), *each.output, 5, 6], 4) for each in requests]
        joined.submit(*(turns[number] for number in order.permutation(40)))
        joined.run(*turns)
        return requests + turns

    cold, warm = conversations(False), conversations(True)
    assert sum(request.cached_tokens or 0 for request in warm) > 1000
    for without, having in zip(cold, warm, strict=True):
        assert without.output == having.output
        a, b = completion_scores(without), completion_scores(having)
        np.testing.assert_allclose(a["logprob"], b["logprob"], rtol=0, atol=SAME)
        np.testing.assert_allclose(a["top_logprobs"], b["top_logprobs"], rtol=0, atol=SAME)


def test_preempted_requests_have_every_value_once(engine: TorchEngine, reference: Any) -> None:
    joined = Joined(engine, PAGE_SIZE, pages=40, max_step_tokens=16)
    requests = [
        scored_request(number, prompt, 30, prompt_top=None if number % 2 else 3, presence_penalty=0.5)
        for number, prompt in enumerate(prompts(8, longest=60))
    ]
    joined.submit(*requests)
    joined.run(*requests)
    assert sum(request.preemptions for request in requests) >= 2
    for request in requests:
        check(reference, request)


def test_moved_requests_have_every_value_once(engine: TorchEngine, reference: Any) -> None:
    first = Joined(engine, PAGE_SIZE, max_step_tokens=16)
    requests = [scored_request(number, prompt, 12, prompt_top=2, repetition_penalty=1.5) for number, prompt in enumerate(prompts(10))]
    first.submit(*requests)
    first.run(*requests, until_tokens=30)
    moved = first.group.evacuate()
    assert {bool(request.output) for request in moved} == {True, False}
    second = Joined(engine, PAGE_SIZE)
    second.submit(*moved)
    second.run(*moved)
    for request in requests:
        check(reference, request)


def test_a_request_for_no_tokens_gets_its_prompts_scores_alone(engine: TorchEngine, reference: Any) -> None:
    joined = Joined(engine, PAGE_SIZE, max_step_tokens=16)
    requests = [scored_request(number, prompt, 0, top=None, prompt_top=0) for number, prompt in enumerate([[9], *prompts(6)])]
    joined.submit(*requests)
    joined.run(*requests)
    for request in requests:
        assert not request.output
        if len(request.prompt_ids) > 1:
            check(reference, request)


def test_neighbours_that_want_none_get_none(engine: TorchEngine) -> None:
    joined = Joined(engine, PAGE_SIZE)
    with_scores, without = scored_request(1, [5, 6, 7], 5), make_request(2, [5, 6, 7], 5)
    alone = make_request(3, [5, 6, 7], 5)
    joined.submit(with_scores, without)
    joined.run(with_scores, without)
    other = Joined(engine, PAGE_SIZE)
    other.submit(alone)
    other.run(alone)
    assert without.output == alone.output
    assert without.scores is None


def test_lpb_06_values_do_not_depend_on_how_tokens_are_sampled(engine: TorchEngine) -> None:
    def values(**sampling: Any) -> np.ndarray:
        """Of tokens that a bias forces, one a request, each after the one before."""
        joined = Joined(engine, PAGE_SIZE)
        found, sequence = [], [5, 6, 7]
        for token in (40, 41, 42, 43):
            request = scored_request(1, sequence, 1, biases=((token, 100.0),), **sampling)
            joined.submit(request)
            joined.run(request)
            assert request.output.tolist() == [token]
            found.append(completion_scores(request)["logprob"][0])
            sequence = [*sequence, token]
        return np.array(found)

    greedy = values(temperature=0.0)
    assert (greedy < -1).all()  # the bias does not show
    for sampling in ({"temperature": 0.5}, {"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0, "repetition_penalty": 2.0}):
        np.testing.assert_allclose(values(**sampling), greedy, rtol=0, atol=SAME)


def test_the_chosen_of_a_greedy_row_is_the_likeliest(engine: TorchEngine) -> None:
    joined = Joined(engine, PAGE_SIZE)
    request = scored_request(1, [5, 6, 7, 8], 20)
    joined.submit(request)
    joined.run(request)
    records = completion_scores(request)
    assert records["top_ids"][:, 0].tolist() == request.output.tolist()
    np.testing.assert_array_equal(records["top_logprobs"][:, 0], records["logprob"])
    assert all((tops[:-1] >= tops[1:]).all() for tops in records["top_logprobs"])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("vocab_size", [7, 50, 257])
def test_ranks_that_hold_columns_find_the_same(size: int, vocab_size: int) -> None:
    random = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(5, vocab_size, generator=random) * 4).round() / 2  # so that many are equal
    chosen = torch.tensor([0, vocab_size - 1, 3, 5, 6], dtype=torch.int32)
    local = -(-vocab_size // size)
    padded = torch.nn.functional.pad(logits, (0, local * size - vocab_size), value=-torch.inf)
    logprob, ids, values = of_all(logits, chosen)
    assert (ids == NO_TOP_ID).sum(dim=1).tolist() == [max(K - vocab_size, 0)] * 5
    for found in on_ranks(
        size, lambda group: of_columns(padded[:, group.rank * local :][:, :local].contiguous(), chosen, group.rank * local, group)
    ):
        torch.testing.assert_close(found[0], logprob)
        torch.testing.assert_close(found[1], ids)
        torch.testing.assert_close(found[2], values)
    assert all((row[:-1] >= row[1:]).all() for row in values)
    assert all(
        a < b
        for row, tops in zip(ids.tolist(), values.tolist(), strict=True)
        for (a, x), (b, y) in pairwise(zip(row, tops, strict=True))
        if x == y and b >= 0
    )


def test_lpb_06_greedy_values_are_no_zeros(engine: TorchEngine) -> None:
    joined = Joined(engine, PAGE_SIZE)
    request = sampled(scored_request(1, [5, 6, 7, 8], 10), temperature=0.0)
    joined.submit(request)
    joined.run(request)
    assert (completion_scores(request)["logprob"] < 0).any()
