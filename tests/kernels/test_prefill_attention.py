import itertools

import pytest
import torch
from torch import Tensor

from kernels.prefill_attention import prefill_attention_torch, prefill_attention_triton
from kernels.prefill_attention_hopper import is_served, prefill_attention_hopper
from tests.kernels.paged import PagedCache, attention
from tests.kernels.support import DEVICE, DTYPES, INTERPRETED, ON_GPU, assert_near, implementations, randn

IMPLEMENTATIONS = implementations(prefill_attention_torch, prefill_attention_triton)
if ON_GPU and torch.cuda.get_device_capability()[0] == 9:
    IMPLEMENTATIONS.append(prefill_attention_hopper)
LENGTHS = [1, 40, 64, 130, 33] if INTERPRETED else [1, 40, 64, 300, 33, 1000]
QUERIES = [1, 40, 3, 65, 0] if INTERPRETED else [1, 40, 3, 170, 0, 555]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "q_heads, kv_heads, head_size, page_size, window",
    [
        (9, 3, 64, 16, None),
        (14, 2, 80, 8, None),
        (7, 1, 96, 32, 20),
        (16, 8, 128, 16, None),
        (5, 1, 128, 16, 70),
        (4, 4, 256, 64, None),
        (8, 2, 64, 16, 5),
        (8, 2, 256, 16, 40),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64(implementation, q_heads, kv_heads, head_size, page_size, window, dtype):
    if INTERPRETED and dtype == torch.float32 and head_size > 64:
        pytest.skip("float32 tiles are small and the interpreter slow: one head size must do")
    cache = PagedCache(LENGTHS, kv_heads, head_size, page_size, dtype, seed=head_size)
    starts = [0, *itertools.accumulate(QUERIES)]
    q, scale = randn(starts[-1], q_heads, head_size, seed=1, dtype=dtype), head_size**-0.5
    if implementation is prefill_attention_hopper and not is_served(q, cache.k_cache):
        pytest.skip("not of this kernel")
    slots = int32(list(range(len(LENGTHS))))

    out = implementation(
        q, cache.k_cache, cache.v_cache, cache.page_table, slots, int32(starts), int32(LENGTHS), max(QUERIES), scale, window
    )

    expected = [attention(q[a:b], *cache.tokens(slot), scale, window) for slot, (a, b) in enumerate(itertools.pairwise(starts)) if a < b]
    assert_near(out, torch.cat(expected), ulps=2, floor=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 30])
def test_a_batch_is_filled_up_by_rows_without_keys_and_rows_without_tokens(implementation, window):
    cache = PagedCache([33, 1], 1, 64, 16, torch.float16)
    q, shared = randn(70, 4, 64, seed=1, dtype=torch.float16), (cache.k_cache, cache.v_cache, cache.page_table)
    alone = implementation(q[:34], *shared, int32([0, 1]), int32([0, 33, 34]), int32([33, 1]), 33, 0.1, window)
    slots, starts, lengths = int32([0, *[1] * 9]), int32([0, 33, 34, *[70] * 8]), int32([33, 1, *[0] * 8])
    filled = implementation(q, *shared, slots, starts, lengths, 70, 0.1, window, torch.full_like(q, torch.nan))
    assert_near(filled[:34], alone, ulps=2)
    assert filled[34:].equal(torch.zeros_like(filled[34:]))


@pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="the reference does not promise it")
@pytest.mark.parametrize("implementation", [each for each in IMPLEMENTATIONS if each is not prefill_attention_torch])
@pytest.mark.parametrize("window", [None, 30])
def test_a_token_is_the_same_in_every_batch_and_chunk(implementation, window):
    dtype = torch.float16
    cache = PagedCache([150, 90], 1, 64, 16, dtype)
    q = randn(150, 4, 64, seed=1, dtype=dtype)
    other = randn(20, 4, 64, seed=2, dtype=dtype)

    def run(queries: Tensor, slots: list[int], starts: list[int], lengths: list[int]) -> Tensor:
        shared = (cache.k_cache, cache.v_cache, cache.page_table)
        out: Tensor = implementation(queries, *shared, int32(slots), int32(starts), int32(lengths), 150, 0.1, window)
        return out

    whole = run(q, [0], [0, 150], [150])
    chunks = [run(q[first:last], [0], [0, last - first], [last]) for first, last in ((0, 1), (1, 67), (67, 150))]
    assert torch.cat(chunks).equal(whole)
    assert run(torch.cat((other, q)), [1, 0], [0, 20, 170], [90, 150])[20:].equal(whole)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows(implementation):
    cache, none = PagedCache([20], 2, 64, 16, torch.float16), int32([])
    out = implementation(
        randn(0, 4, 64, seed=1, dtype=torch.float16), cache.k_cache, cache.v_cache, cache.page_table, none, int32([0]), none, 0, 0.1
    )
    assert out.shape == (0, 4, 64)
