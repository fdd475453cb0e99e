"""The Gluon kernel in threads; on a GPU, test_prefill_attention.py has it beside the others."""

import itertools

import pytest
import torch
from torch import Tensor

from kernels import prefill_attention_hopper
from kernels.prefill_attention_hopper import CONFIG, HopperConfig
from tests.kernels.gluon_threads import Threads
from tests.kernels.paged import PagedCache, attention
from tests.kernels.support import INTERPRETED, ON_GPU, assert_near, randn

pytestmark = [
    pytest.mark.skipif(ON_GPU, reason="the kernel itself runs there"),
    pytest.mark.skipif(INTERPRETED, reason="it needs no interpreter, and runs without"),
]
LENGTHS, QUERIES = [1, 40, 300, 33, 70], [1, 3, 170, 0, 70]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def in_threads(monkeypatch: pytest.MonkeyPatch, eager: bool, programs: int) -> None:
    monkeypatch.setattr(
        prefill_attention_hopper,
        "_prefill_attention_hopper_kernel",
        Threads(prefill_attention_hopper._prefill_attention_hopper_kernel, eager),
    )
    monkeypatch.setattr(prefill_attention_hopper, "multiprocessors", lambda device: programs)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
    "q_heads, kv_heads, head_size, page_size, window, tuned",
    [
        (5, 1, 128, 16, None, CONFIG),
        (100, 1, 64, 16, 50, CONFIG),  # a token a tile, none for the last group
        (4, 2, 64, 64, 70, HopperConfig(2, 128, 2)),
        (3, 3, 64, 8, None, HopperConfig(3, 64, 2)),
    ],
)
def test_matches_float64(eager, q_heads, kv_heads, head_size, page_size, window, tuned, monkeypatch):
    in_threads(monkeypatch, eager, 3)
    cache, starts = PagedCache(LENGTHS, kv_heads, head_size, page_size, torch.float16), [0, *itertools.accumulate(QUERIES)]
    q, scale = randn(starts[-1], q_heads + 2, head_size, seed=1, dtype=torch.float16)[:, :q_heads], head_size**-0.5
    rows = cache.page_table, int32([*range(len(LENGTHS))]), int32(starts), int32(LENGTHS)

    out = prefill_attention_hopper.prefill_attention_hopper(
        q, cache.k_cache, cache.v_cache, *rows, max(QUERIES), scale, window, None, tuned
    )

    expected = [attention(q[a:b], *cache.tokens(slot), scale, window) for slot, (a, b) in enumerate(itertools.pairwise(starts)) if a < b]
    assert_near(out, torch.cat(expected), ulps=2)


def test_rows_without_queries_read_and_write_nothing(monkeypatch):
    in_threads(monkeypatch, True, 2)
    cache, q = PagedCache([33, 1], 1, 64, 16, torch.float16), randn(40, 2, 64, seed=1, dtype=torch.float16)
    rows = cache.page_table, int32([0, 1]), int32([0, 0, 0]), int32([33, 0])
    out = prefill_attention_hopper.prefill_attention_hopper(q, cache.k_cache, cache.v_cache, *rows, 40, 0.1, None, torch.ones_like(q))
    assert out.equal(torch.ones_like(q))
