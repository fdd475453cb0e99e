"""Sums through mailboxes: two ranks as two processes on shared memory, which is what GPUs' memory is to each other."""

import mmap
import multiprocessing
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.all_reduce import (
    WAYS,
    Way,
    all_reduce,
    all_reduce_add_rms_norm,
    all_reduce_add_rms_norm_torch,
    all_reduce_torch,
    fits,
    norm_fits,
    norm_is_fused,
    way_of,
)
from kernels.mailboxes import BLOCKS, MAX_RANKS, Peers, mailbox_bytes
from tests.kernels.support import DTYPES, INTERPRETED, assert_near, randn

in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="between GPUs, tests/gpu has these")
EPS = 1e-6
DEADLINE_S = 60.0


def shared(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    x = torch.zeros(shape, dtype=dtype)
    x.share_memory_()
    return x


def run(size: int, rank_main: Callable[[Peers], None], first_epoch: int = 0) -> None:
    """Runs all ranks, each in a process of its own but for rank 0, which runs here; first_epoch: launches so far."""
    # Mapped, not in a folder of shared memory, which may be small: pages that nobody touches take nothing.
    mailboxes = [torch.frombuffer(mmap.mmap(-1, mailbox_bytes(size)), dtype=torch.uint8) for _ in range(size)]
    for mailbox in mailboxes:
        mailbox[: 4 * BLOCKS.value].view(torch.int32).fill_(first_epoch)
    addresses = torch.tensor([mailbox.data_ptr() for mailbox in mailboxes])
    fork = multiprocessing.get_context("fork")  # memory stays where it is
    others = [fork.Process(target=rank_main, args=(Peers(rank, size, addresses),)) for rank in range(1, size)]
    for each in others:
        each.start()
    rank_main(Peers(0, size, addresses))
    for each in others:
        each.join(DEADLINE_S)
        assert each.exitcode == 0


def parts(size: int, *shape: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    made = [randn(*shape, seed=10 * seed + rank, dtype=dtype) for rank in range(size)]
    return [shared(*shape, dtype=dtype).copy_(each) for each in made]


@in_the_interpreter
def test_two_ranks_get_the_sum_time_after_time_and_the_norm_of_it() -> None:
    """Sizes beside the powers of two, in one program and in several; the ways mixed, so that programs differ in their epochs."""
    sizes = [(Way.FLAGGED, 2), (Way.ONE_SHOT, 4_100), (Way.FLAGGED, 1_026), (Way.TWO_SHOT, 4_102), (Way.TWO_SHOT, 10), (Way.FLAGGED, 1_026)]
    launches = [(way, parts(2, count, dtype=dtype, seed=number)) for dtype in DTYPES for number, (way, count) in enumerate(sizes)]
    norms = [
        (parts(2, tokens, width, dtype=dtype, seed=9), parts(1, tokens, width, dtype=dtype) * 2, randn(width, seed=7, dtype=dtype))
        for dtype in DTYPES
        for tokens, width in ((1, 1536), (3, 132))
    ]
    before = [[part.clone() for part in each] for _, each in launches]
    normed = [all_reduce_add_rms_norm_torch(x, residual[0].clone(), weight, EPS) for x, residual, weight in norms]
    norms = [(x, [shared(*each.shape, dtype=each.dtype).copy_(each) for each in residual], weight) for x, residual, weight in norms]

    def rank_main(peers: Peers) -> None:
        for way, each in launches:
            assert all_reduce(each[peers.rank], peers, way) is each[peers.rank]
        for x, residual, weight in norms:
            x[peers.rank].copy_(all_reduce_add_rms_norm(x[peers.rank], residual[peers.rank], weight, EPS, peers))

    sums = [all_reduce_torch(x).float() + residual[0].float() for x, residual, _ in norms]
    run(2, rank_main)
    for (way, each), was in zip(launches, before, strict=True):
        assert all(torch.equal(part, all_reduce_torch(was)) for part in each), (way, each[0].dtype, len(each[0]))
    for (x, residual, _), expected, total in zip(norms, normed, sums, strict=True):
        assert torch.equal(*x)
        assert all(torch.equal(own, total.to(own.dtype)) for own in residual)
        assert_near(x[0], expected.double(), ulps=1, floor=4e-6)


@in_the_interpreter
def test_three_ranks_over_the_end_of_the_count() -> None:
    launches = [(way, parts(3, 402, dtype=torch.float32, seed=number)) for number, way in enumerate(Way)]
    before = [[part.clone() for part in each] for _, each in launches]

    def rank_main(peers: Peers) -> None:
        for way, each in launches:
            all_reduce(each[peers.rank], peers, way)

    run(3, rank_main, first_epoch=2**31 - 2)
    for (way, each), was in zip(launches, before, strict=True):
        assert all(torch.equal(part, all_reduce_torch(was)) for part in each), way


def test_the_reference_adds_in_float32_in_the_order_of_the_ranks() -> None:
    values = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, -256.0)]
    assert all_reduce_torch(values).item() == 2.0


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_larger_messages_go_later_ways_and_the_largest_to_the_library(size: int) -> None:
    chosen = [way_of(torch.empty(1 << power, dtype=torch.uint8).view(torch.bfloat16), size) for power in range(4, 26)]
    table = next(WAYS[ranks] for ranks in sorted(WAYS) if ranks >= size)
    largest = 1 << 25
    assert list(dict.fromkeys(chosen)) == [*(way for _, way in table), *([None] if table[-1][0] < largest else [])]
    assert all(min(most, largest) <= _limit(way) for most, way in table)


def _limit(way: Way) -> int:
    """The most bytes that fit."""
    return max(1 << power for power in range(4, 26) if fits(torch.empty(1 << power, dtype=torch.uint8).view(torch.float32), way))


def test_what_no_mailbox_takes_is_for_the_library() -> None:
    assert way_of(torch.zeros(64), 2) is Way.FLAGGED
    others: list[Tensor] = [
        torch.zeros(64, dtype=torch.int32),
        torch.zeros(0),
        torch.zeros(65, dtype=torch.bfloat16),  # no whole number of words
        torch.zeros(8, 8).T,
        torch.zeros(64)[1:],
    ]
    assert [way_of(each, 2) for each in others] == [None] * len(others)
    assert way_of(torch.zeros(64), MAX_RANKS + 1) is None


def test_two_ranks_send_in_the_way_that_was_measured_to_be_fastest() -> None:
    sizes = (10, 256, 384, 512, 2_560, 8_192, 8_200, 16_384, 16_400)
    ways = [way_of(torch.empty(size << 9, dtype=torch.bfloat16), 2) for size in sizes]
    assert ways == [*[Way.FLAGGED] * 3, *[Way.ONE_SHOT] * 3, *[Way.TWO_SHOT] * 2, None]


def test_the_norm_is_fused_for_rows_that_programs_can_hold_where_it_pays() -> None:
    def made(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    assert norm_fits(made(1, 5120))
    assert norm_fits(made(64, 8192))
    assert not norm_fits(made(1, 8194))
    assert not norm_fits(made(65, 64))
    assert not norm_fits(made(1, 5121))
    assert norm_is_fused(made(1, 5120), 4)
    assert not norm_is_fused(made(64, 8192), 4)
    assert not norm_is_fused(made(1, 5120), 2)
    assert not norm_is_fused(made(1, 8194), 4)


def test_refusals() -> None:
    x, peers = torch.zeros(2, 8), Peers(0, 2, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"residual must be a contiguous torch\.float32, got torch\.float32 with strides"):
        all_reduce_add_rms_norm(x, torch.zeros(8, 2).T, torch.zeros(8), EPS, peers)
    with pytest.raises(ValueError, match="at most 8 ranks share memory, got 9"):
        mailbox_bytes(9)
