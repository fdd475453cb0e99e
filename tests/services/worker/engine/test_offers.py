"""A head that makes offers: the same tokens and log-probabilities as by all logits, though those that nobody asked for are not there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.driver import admission, spec
from kernels import tuning
from kernels.offering_head import Noise, Scores, offering_head_torch
from kernels.sampling import sample
from services.scheduler.requests import Request
from services.worker.distributed.board import Mark
from services.worker.engine.engine import TorchEngine
from services.worker.engine.features import ALL_SAMPLING, NO_FEATURES, Feature, SlotFeatures
from services.worker.engine.sampling import ASKING, Sampling, sampler_of
from services.worker.engine.slots import Slots, asks_for_more
from services.worker.layers.backends import Backends
from services.worker.layers.vocabulary import VocabularyTable
from shared.protocol.plan import SlotFlag
from tests.services.joined import Joined, completion_scores, scored_request
from tests.services.worker.engine.test_logprobs import PAGE_SIZE, prompts
from tests.services.worker.engine.test_sampling import SIZES, Threads, on_ranks, sampling
from tests.tiny import MAX_LENGTH, tiny_model

MIX: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"presence_penalty": 2.0},
    {"temperature": 1.2, "frequency_penalty": 1.0, "biases": ((7, 4.0), (250, -2.0))},
    {"temperature": 0.6, "top_k": 20},
]


def offers_alone(x: Tensor, weight: Tensor, real: int, first: int, noise: Noise | None, asks: Tensor | None, every: bool) -> Scores:
    """The reference, with no number in the logits of rows that ask for nothing."""
    logits, offers = offering_head_torch(x, weight, real, first, noise, asks, every)
    if logits is not None and asks is not None and not every:
        logits[asks == 0] = torch.nan
    return Scores(logits, offers)


def requests_of(count: int, ways: list[dict[str, Any]], ends: dict[int, int] | None = None) -> list[Request]:
    """ends: a stop id by request, which must not end it before its 12th token."""
    requests = []
    for number, prompt in enumerate(prompts(count, 60)):
        known = [3 + token % 250 for token in prompt]  # of every tiny model
        request = scored_request(number, known, 15, top=3 if number % 5 == 4 else None, **ways[number % len(ways)])
        requests.append(replace(request, min_tokens=12, stop_ids=(ends[number],)) if ends and number in ends else request)
    return requests


@contextmanager
def measured(*heads: Tensor) -> Iterator[None]:
    """Tables that have the heads of these weights, float32."""
    entries = {"x".join(map(str, weight.shape)): {"64": [1]} for weight in heads}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "tables", lambda device: {triton.__version__: {"32 bits": {"offering_head": entries}}})
        tuning.forget()
        yield
    tuning.forget()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[TorchEngine, TorchEngine]:
    model: Path = tiny_model(tmp_path_factory.mktemp("tiny"))
    by_logits, by_offers = (
        TorchEngine(spec(model, device="cpu", page_size=PAGE_SIZE, num_pages=500, max_model_len=MAX_LENGTH), lambda phase, part: None)
        for _ in range(2)
    )
    head = by_offers.model.head
    head.backends = replace(head.backends, offers=offers_alone)
    with measured(head.weight):
        by_offers.sampler = sampler_of("best", head, by_offers.mark)
    assert by_offers.sampler.apart
    assert not by_logits.sampler.apart
    return by_logits, by_offers


@pytest.mark.parametrize("ways", [MIX[:1], MIX[:2], MIX], ids=["greedy", "temperatures", "all"])
def test_tokens_and_log_probabilities_are_those_of_all_logits(engines: tuple[TorchEngine, TorchEngine], ways: list[dict[str, Any]]) -> None:
    def run(engine: TorchEngine, ends: dict[int, int] | None = None) -> list[Request]:
        joined, requests = Joined(engine, PAGE_SIZE, max_step_tokens=24), requests_of(14, ways, ends)
        joined.submit(*requests)
        joined.run(*requests)
        return requests

    by_logits, by_offers = engines
    ends = {number: int(request.output[2]) for number, request in enumerate(run(by_logits)) if number % 4 == 3}
    for one, other in zip(run(by_logits, ends), run(by_offers, ends), strict=True):
        assert len(one.output) >= 12
        assert one.output == other.output
        np.testing.assert_array_equal(completion_scores(one), completion_scores(other))


@pytest.mark.parametrize("size", SIZES)
def test_ranks_exchange_eight_bytes_a_row_and_logits_where_a_row_asks_for_them(size: int) -> None:
    logits = torch.randn(6, 257, generator=torch.Generator().manual_seed(4))
    plain = sampling(6, {"temperature": 0.0}, {"temperature": 0.8})
    mixed = sampling(6, {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.9, "top_p": 0.7})

    def compute(group: Threads) -> list[tuple[list[int], int]]:
        backends = Backends(group, None, None, None, None, None, offers=offers_alone)  # type: ignore[arg-type]
        head = VocabularyTable(257, 257, backends)
        head.weight[: head.real] = torch.eye(257)[head.first :][: head.real]  # its hidden states are the logits
        sampler, results = sampler_of("best", head, Mark(None)), []
        assert sampler.apart
        cases: list[tuple[Sampling | None, Feature]] = [(None, NO_FEATURES), (plain, Feature.SAMPLING), (mixed, ALL_SAMPLING)]
        for how, features in cases:
            group.bytes = 0
            results.append((sampler.choose(sampler.score(logits, how, features), how).tolist(), group.bytes))
        return results

    offered, gathered = (8 * 6, 4 * 6 * -(-257 // size)) if size > 1 else (0, 0)
    cold = sampling(6, {"temperature": 0.0})
    expected = [(sample(logits, *how.tensors).tolist(), offered) for how in (cold, plain)]
    expected.append((sample(logits, *mixed.tensors).tolist(), offered + gathered))
    with measured(torch.empty(-(-257 // size), 257)):
        assert on_ranks(size, compute) == [expected] * size


@pytest.mark.parametrize("offering", [(True, True), (True, False), (False, False)])
def test_ranks_make_offers_only_if_all_have_measured_the_same(offering: tuple[bool, bool]) -> None:
    """Else they would wait for each other in different exchanges."""

    def compute(group: Threads) -> bool:
        backends = Backends(group, None, None, None, None, None, offers=offers_alone if offering[group.rank] else None)  # type: ignore[arg-type]
        return VocabularyTable(258, 8, backends).makes_offers()

    with measured(torch.empty(129, 8)):
        assert on_ranks(2, compute) == [all(offering)] * 2


def test_a_slot_asks_for_what_its_last_request_asks_for() -> None:
    slots = Slots(3, 1, torch.tensor([2], dtype=torch.int32))
    for top_p, asks in ((0.9, 1), (1.0, 0), (0.5, 1)):
        slots.admit(torch.from_numpy(admission(1, MAX_LENGTH, temperature=1.0, top_p=top_p).view(np.int32).reshape(1, -1)))
        assert slots.sampling(torch.tensor([0, 1, 2]), torch.zeros(3, dtype=torch.int32)).asks.tolist() == [0, asks, 0]


@given(
    temperature=st.sampled_from([0.0, 1e-6, 1e-5, 0.7]),
    top_k=st.sampled_from([0, -1, 1, 50]),
    top_p=st.sampled_from([1.0, 0.999, 0.0]),
    min_p=st.sampled_from([0.0, 0.01]),
    flags=st.sampled_from([*SlotFlag, SlotFlag.PENALTIES | SlotFlag.LOGPROBS]),
    min_length=st.integers(0, 4),
    prompt_length=st.integers(0, 4),
)
def test_the_device_asks_for_logits_where_the_host_picks_a_step_that_has_them(**fields: Any) -> None:
    admissions = np.array([admission(0, MAX_LENGTH, **fields)]).reshape(-1)
    features = SlotFeatures(1)
    features.admit(admissions)
    records = torch.from_numpy(admissions.view(np.int32).reshape(len(admissions), -1))
    wanted = features.of(np.zeros(1, dtype=np.int32)) & ASKING & ~Feature.LOGPROBS
    assert asks_for_more(records).tolist() == [bool(wanted)]
