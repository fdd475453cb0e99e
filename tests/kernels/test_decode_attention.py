import pytest
import torch

from kernels.decode_attention import decode_attention, decode_attention_torch, decode_attention_triton
from kernels.rope import rope_and_store
from tests.kernels.paged import PagedCache, attention
from tests.kernels.support import DEVICE, DTYPES, INTERPRETED, ON_GPU, assert_near, implementations, randn

IMPLEMENTATIONS = implementations(decode_attention_torch, decode_attention_triton)
LENGTHS = [1, 17, 64, 65, 150] if INTERPRETED else [1, 17, 64, 65, 190, 1000, 989]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "q_heads, kv_heads, head_size, page_size, window, splits",
    [
        (9, 3, 64, 16, None, None),
        (14, 2, 80, 8, None, 4),
        (7, 1, 96, 32, 20, 3),
        (16, 8, 128, 16, None, 1),
        (5, 1, 128, 16, 70, 8),
        (4, 4, 256, 64, None, 2),
        (32, 1, 64, 16, 1, 2),
        (8, 2, 256, 16, 40, None),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64(implementation, q_heads, kv_heads, head_size, page_size, window, splits, dtype):
    cache = PagedCache(LENGTHS, kv_heads, head_size, page_size, dtype, seed=head_size)
    slots = list(range(len(LENGTHS)))[::-1]
    q = randn(len(slots), q_heads, head_size, seed=1, dtype=dtype)
    lengths = torch.tensor([LENGTHS[slot] for slot in slots], dtype=torch.int32, device=DEVICE)
    slots_tensor = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    scale, cut = head_size**-0.5, {"splits": splits} if implementation is decode_attention_triton else {}

    out = implementation(q, cache.k_cache, cache.v_cache, cache.page_table, slots_tensor, lengths, scale, window, **cut)

    expected = torch.cat([attention(q[row : row + 1], *cache.tokens(slot), scale, window) for row, slot in enumerate(slots)])
    assert_near(out, expected, ulps=2, floor=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_of_length_zero_gives_zeros(implementation):
    cache = PagedCache([20, 30], 2, 64, 16, torch.float32)
    slots, lengths = torch.tensor([[0, 1], [0, 30]], dtype=torch.int32, device=DEVICE)
    room = torch.full((3, 4, 64), torch.nan, device=DEVICE)
    arguments = (randn(2, 4, 64, seed=1), cache.k_cache, cache.v_cache, cache.page_table, slots, lengths, 0.1)
    out = implementation(*arguments)
    decode_attention(*arguments, out=room[1:])
    assert_near(room[1:], out, ulps=4)
    assert out[0].equal(torch.zeros(4, 64, device=DEVICE))
    assert out[1].isfinite().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows(implementation):
    cache, none = PagedCache([20], 2, 64, 16, torch.float32), torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert implementation(randn(0, 4, 64, seed=1), cache.k_cache, cache.v_cache, cache.page_table, none, none, 0.1).shape == (0, 4, 64)


@pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="the reference is not split")
def test_with_fixed_splits_a_row_is_the_same_in_every_batch():
    cache = PagedCache([190, 3, 77], 2, 64, 16, torch.float16)
    q = randn(3, 6, 64, seed=1, dtype=torch.float16)
    slots, lengths = torch.tensor([[0, 1, 2], [190, 3, 77]], dtype=torch.int32, device=DEVICE)
    together = decode_attention_triton(q, cache.k_cache, cache.v_cache, cache.page_table, slots, lengths, 0.1, None, 4)
    for row in range(3):
        one = slice(row, row + 1)
        alone = decode_attention_triton(q[one], cache.k_cache, cache.v_cache, cache.page_table, slots[one], lengths[one], 0.1, None, 4)
        assert together[one].equal(alone)


@pytest.mark.skipif(not ON_GPU, reason="elsewhere programs run one after the other")
def test_the_order_in_which_shares_are_ready_does_not_show():
    cache = PagedCache([1000, 700, 3], 8, 128, 16, torch.bfloat16)
    slots, lengths = torch.tensor([[0, 1, 2], [1000, 700, 3]], dtype=torch.int32, device=DEVICE)
    q = randn(3, 16, 128, seed=1, dtype=torch.bfloat16)
    outs = [decode_attention_triton(q, cache.k_cache, cache.v_cache, cache.page_table, slots, lengths, 0.1) for _ in range(200)]
    assert all(out.equal(outs[0]) for out in outs)


@pytest.mark.skipif(not ON_GPU, reason="takes a CUDA graph")
def test_a_captured_launch_follows_the_lengths_on_the_device():
    cache = PagedCache([700, 300], 2, 128, 16, torch.bfloat16)
    q, scale = randn(2, 8, 128, seed=1, dtype=torch.bfloat16), 0.1
    slots, lengths = torch.tensor([[0, 1], [5, 9]], dtype=torch.int32, device=DEVICE)
    arguments = (q, cache.k_cache, cache.v_cache, cache.page_table, slots, lengths, scale)
    decode_attention_triton(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention_triton(*arguments)
    for row_lengths in ([700, 300], [64, 65], [0, 1], [650, 2]):
        lengths.copy_(torch.tensor(row_lengths))
        graph.replay()
        for row, length in enumerate(row_lengths):
            k, v = (tokens[:length] for tokens in cache.tokens(row))
            expected = attention(q[row : row + 1], k, v, scale, None) if length else torch.zeros(1, 8, 128, device=DEVICE)
            assert_near(out[row : row + 1], expected, ulps=2)


@pytest.mark.skipif(not ON_GPU, reason="takes a cache of more than 2**31 elements")
def test_pages_beyond_two_to_the_31_elements():
    pages, page_size, kv_heads, head_size = 2**31 // (16 * 8 * 128) + 64, 16, 8, 128
    k_cache, v_cache = (torch.zeros(pages, page_size, kv_heads, head_size, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    table = torch.arange(pages - 8, pages, dtype=torch.int32, device=DEVICE)[None]
    k_cache[-8:], v_cache[-8:] = randn(2, 8, page_size, kv_heads, head_size, seed=1, dtype=torch.bfloat16)
    q, slots = randn(1, 16, head_size, seed=2, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = decode_attention_triton(q, k_cache, v_cache, table, slots, slots + 100, 0.1)
    expected = attention(q, k_cache[-8:].flatten(0, 1)[:100].double(), v_cache[-8:].flatten(0, 1)[:100].double(), 0.1, None)
    assert_near(out, expected, ulps=2)


@pytest.mark.skipif(not ON_GPU, reason="elsewhere a kernel ends before the next one begins")
def test_the_newest_key_and_value_may_come_from_the_kernel_just_before():
    rows = [700, 300, 129, 1]
    cache = PagedCache(rows, 2, 128, 16, torch.bfloat16)
    slots, lengths = torch.tensor([[0, 1, 2, 3], rows], dtype=torch.int32, device=DEVICE)
    positions = lengths - 1
    locations = cache.page_table[slots.long(), (positions // 16).long()].long() * 16 + positions % 16
    q, k, v = randn(4, 12, 128, seed=1, dtype=torch.bfloat16).split([8, 2, 2], dim=1)
    table = torch.cat((torch.ones(700, 64, device=DEVICE), torch.zeros(700, 64, device=DEVICE)), dim=1)  # turns nothing

    def step() -> torch.Tensor:
        rotated = rope_and_store(q, k, v, positions, table, locations, cache.k_cache, cache.v_cache)
        return decode_attention_triton(rotated, cache.k_cache, cache.v_cache, cache.page_table, slots, lengths, 0.1)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(20):
        for contents in (cache.k_cache, cache.v_cache):
            contents.view(-1, 2, 128)[locations] = 50.0
        graph.replay()
        expected = torch.cat([attention(q[row : row + 1], *cache.tokens(row), 0.1, None) for row in range(4)])
        assert_near(out, expected, ulps=2)
