"""Candidates against all logits: the same tokens for far fewer bytes. The ranks are threads of this process."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.sampling import sample
from services.worker.distributed.board import Board, Mark
from services.worker.distributed.communicator import SingleCommunicator
from services.worker.distributed.torch_group import in_columns
from services.worker.engine.features import ALL_SAMPLING, NO_FEATURES, Feature
from services.worker.engine.sampling import CANDIDATES, BestSampler, CandidateSampler, FullSampler, Sampler, Sampling
from services.worker.engine.slots import Slots
from services.worker.layers.backends import Backends
from services.worker.layers.vocabulary import VocabularyTable
from tests.chi_square import assert_distributed
from tests.services.worker.models.group import Group, Job, Local

T = TypeVar("T")
SIZES = [1, 2, 4]
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


class Threads(SingleCommunicator):
    """A rank whose peers are other threads; counts the bytes that it gives to gathers."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, given: dict[int, Tensor]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._given, self.bytes = barrier, given, 0

    def all_gather(self, x: Tensor) -> Tensor:
        self.bytes += x.nbytes
        self._given[self.rank] = x
        self._barrier.wait(30)
        gathered = in_columns(torch.stack([self._given[rank] for rank in range(self.size)]))
        self._barrier.wait(30)
        return gathered

    def minimum(self, value: int) -> int:
        counted = self.bytes
        least = self.all_gather(torch.tensor([[value]])).min()
        self.bytes = counted  # an agreement at start is no exchange of a step
        return int(least)


def on_ranks(size: int, compute: Callable[[Threads], T]) -> list[T]:
    barrier, given = threading.Barrier(size), dict[int, Tensor]()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: compute(Threads(rank, size, barrier, given)), range(size)))


def given_logits(group: Threads, logits: Tensor) -> VocabularyTable:
    """A head whose "hidden states" are the logits themselves: each rank takes its columns of them."""

    def columns(x: Tensor, weight: Tensor) -> Tensor:
        return F.pad(x[:, head.first :][:, : len(weight)], (0, len(weight) - head.real))

    head = VocabularyTable(logits.shape[1], 1, Backends(group, None, None, columns, None, None))  # type: ignore[arg-type]
    return head


def tokens_of(sampler: Sampler, hidden: Tensor, how: Sampling | None) -> Tensor:
    """Of rows that ask for no more than a temperature."""
    return sampler.choose(sampler.score(hidden, how, NO_FEATURES if how is None else Feature.SAMPLING), how)


def sampling(rows: int, *settings: dict[str, float]) -> Sampling:
    """Row n has setting n, from the first on again, and seed n."""

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([{**PLAIN, **settings[row % len(settings)]}[name] for row in range(rows)], dtype=dtype)

    floats = [column(name, torch.float32) for name in ("temperature", "top_p", "min_p")]
    seeds, positions = torch.arange(rows) - 3, torch.arange(rows, dtype=torch.int32) * 7
    top_k = column("top_k", torch.int32)
    asks = (floats[0] > 0) & ((top_k > 0) | (floats[1] < 1) | (floats[2] > 0))
    return Sampling(floats[0], top_k, floats[1], floats[2], seeds, positions, asks.int())


def check(size: int, logits: Tensor, how: Sampling) -> tuple[list[int], int]:
    """Every rank's tokens are those of the whole logits; returns the bytes that ranks gave, and how many rows were gathered."""
    board = Board(size)

    def compute(group: Threads) -> tuple[list[int], int]:
        sampler = CandidateSampler(given_logits(group, logits), Mark(board.descriptor, group.rank))
        return tokens_of(sampler, logits, how).tolist(), group.bytes

    expected = sample(logits, *how.tensors).tolist()
    results = on_ranks(size, compute)
    assert [tokens for tokens, _ in results] == [expected] * size
    return [given for _, given in results], board.gathered_rows


SETTINGS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 1e-6},
    {"top_k": 1},
    {"top_k": 5, "temperature": 2.0},
    {"top_k": CANDIDATES},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 40, "min_p": 0.02, "temperature": 1.5},
    {"top_k": CANDIDATES + 1},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 10**6},
    {"temperature": 0.0, "top_p": 0.5},
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab_size", [5, 257, 1000, 4099])
def test_the_tokens_are_those_of_all_logits(size: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(280, vocab_size, generator=generator)
    check(size, logits, sampling(len(logits), *SETTINGS))


@pytest.mark.parametrize("size", SIZES)
def test_equal_logits_zeros_of_both_signs_infinities_and_nans(size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-2, 2, (70, 101), generator=generator).float()  # many equal ones, also at the cut of top-k
    logits[::2] *= torch.randint(0, 2, (35, 101), generator=generator) * 2 - 1.0  # -0 among them
    logits[10, 3:] = -torch.inf
    logits[11] = -torch.inf
    logits[12, 60] = torch.inf
    logits[20:34, 77] = torch.nan
    logits[30, 0] = -torch.nan
    check(size, logits, sampling(len(logits), *SETTINGS[:7]))


@pytest.mark.parametrize("size", [2, 4])
def test_far_fewer_bytes_and_only_rows_without_a_small_top_k_are_gathered(size: int) -> None:
    logits = torch.randn(8, 32_003, generator=torch.Generator().manual_seed(2))
    whole = 4 * math.ceil(32_003 / size)

    def row_bytes(*settings: dict[str, float]) -> tuple[int, int]:
        (given, *others), gathered = check(size, logits, sampling(8, *settings))
        assert others == [given] * (size - 1)
        return given // 8, gathered

    assert row_bytes({"temperature": 0.0}, {}) == (8, 0)
    assert row_bytes({"top_k": 20}, {"top_k": 5, "top_p": 0.9}) == (8 * CANDIDATES, 0)
    assert row_bytes({"top_p": 0.9}, {"min_p": 0.1}) == (whole, 8)
    assert row_bytes({"temperature": 0.0}, {"top_k": 20}, {"top_p": 0.9}, {}) == ((8 + 8 * CANDIDATES + whole + 8) // 4, 2)


@pytest.mark.parametrize("settings", [{}, {"top_k": 9}, {"top_p": 0.8}])
def test_candidates_are_distributed_as_the_definition_says(settings: dict[str, float]) -> None:
    rows, columns = 4_000, 41
    logits = 2 * torch.randn(columns, generator=torch.Generator().manual_seed(5))
    how = sampling(rows, {**settings, "temperature": 1.2})
    probability = (logits.double() / 1.2).softmax(dim=0)
    ordered, order = probability.sort(descending=True)
    ordered[int(settings.get("top_k", columns)) :] = 0
    ordered[ordered.cumsum(dim=0) - ordered >= settings.get("top_p", 1.0)] = 0
    probability = torch.zeros_like(ordered).index_copy_(0, order, ordered / ordered.sum())

    def compute(group: Threads) -> Tensor:
        sampler = CandidateSampler(given_logits(group, logits[None]), Mark(None))
        return tokens_of(sampler, logits.expand(rows, -1), how)

    for tokens in on_ranks(2, compute):
        assert_distributed(tokens, probability)


def test_the_other_sampler_gathers_all_logits() -> None:
    logits = torch.randn(4, 257, generator=torch.Generator().manual_seed(3))
    how = sampling(4, {"temperature": 0.0}, {"top_p": 0.9})

    def compute(group: Threads) -> tuple[list[int], int]:
        sampler = FullSampler(given_logits(group, logits))
        return tokens_of(sampler, logits, how).tolist(), group.bytes

    assert on_ranks(2, compute) == [(sample(logits, *how.tensors).tolist(), 4 * 4 * 129)] * 2


@pytest.mark.parametrize("size", SIZES)
def test_rows_without_filters_take_eight_bytes_from_each_rank(size: int) -> None:
    logits = torch.randn(5, 257, generator=torch.Generator().manual_seed(4))
    logits[3, 200] = torch.nan
    hot = sampling(5, {"temperature": 0.0}, {"temperature": 0.8})

    def compute(group: Threads) -> list[tuple[list[int], int]]:
        sampler, results = BestSampler(given_logits(group, logits)), []
        for how in (None, hot):
            group.bytes = 0
            results.append((tokens_of(sampler, logits, how).tolist(), group.bytes))
        return results

    cold = sampling(5, {"temperature": 0.0})
    expected = [(sample(logits, *how.tensors).tolist(), 8 * 5) for how in (cold, hot)]
    assert on_ranks(size, compute) == [expected if size > 1 else [(tokens, 0) for tokens, _ in expected]] * size


def test_rows_that_ask_for_more_are_changed_and_sampled_from_all_logits() -> None:
    logits = torch.randn(4, 257, generator=torch.Generator().manual_seed(3))
    how = sampling(4, {"temperature": 0.0}, {"top_p": 0.9})

    def compute(group: Threads) -> tuple[list[int], int]:
        sampler = BestSampler(given_logits(group, logits))
        scores = sampler.score(logits, how, ALL_SAMPLING)
        assert torch.equal(scores.wanted_logits, logits)
        assert (sampler.first, sampler.columns) == (0, 257)
        return sampler.choose(scores, how).tolist(), group.bytes

    assert on_ranks(2, compute) == [(sample(logits, *how.tensors).tolist(), 4 * 4 * 129)] * 2


@pytest.mark.parametrize("cuts", [(0, 50), (0, 13, 26, 39, 50)])
def test_ids_that_would_end_a_row_early_are_forbidden_on_the_rank_that_holds_them(cuts: tuple[int, ...]) -> None:
    slots = Slots(3, 1, torch.tensor([2, 12, 13], dtype=torch.int32))
    slots.min_length[:2] = 10
    slots.ignore_eos[1] = True
    slots.stop_ids[:2, :3] = torch.tensor([0, 25, 49])
    logits, rows, lengths = torch.zeros(3, 50), torch.arange(3), torch.tensor([9, 5, 5], dtype=torch.int32)
    for first, end in pairwise(cuts):
        slots.forbid_early_end(logits[:, first:end], rows, lengths, first)
    forbidden = [(row == -torch.inf).nonzero().flatten().tolist() for row in logits]
    assert forbidden == [[0, 2, 12, 13, 25, 49], [0, 25, 49], []]


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_ranks_choose_the_same_tokens_from_what_they_offer(
    checkpoint: Callable[[str], Path], group: Callable[[int], Group | Local], ranks: int
) -> None:
    prompts = ((5, 6, 7, 100), (9,), tuple(range(3, 40)))
    how: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 10},
        {"temperature": 1.0, "min_length": 500, "stop_ids": tuple(range(0, 256, 16))},
        {"temperature": 1.0, "top_p": 0.7},
    ]
    for settings in how:
        kinds = ("full", "best", "candidates")
        jobs = [Job(checkpoint("qwen2"), prompts, 8, sampling=settings, spec={"sampling_gather": kind}) for kind in kinds]
        assert len({outcome.tokens.tobytes() for job in jobs for outcome in group(ranks).run(job)}) == 1
