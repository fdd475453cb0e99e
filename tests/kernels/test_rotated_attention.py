from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.embedding import embedding
from kernels.rope import rope_and_store
from kernels.rotated_attention import rotated_attention, rotated_attention_torch, rotated_attention_triton, rotates_within
from tests.kernels.paged import PagedCache, attention
from tests.kernels.support import DEVICE, DTYPES, INTERPRETED, ON_GPU, assert_near, implementations, randn
from tests.kernels.test_rope import EPS, rotated

IMPLEMENTATIONS = implementations(rotated_attention_torch, rotated_attention_triton)
LENGTHS = [1, 17, 0, 65, 66, 150] if INTERPRETED else [1, 17, 0, 64, 65, 66, 190, 1000, 989]


class Rows(NamedTuple):
    """One new token of each slot of a cache, in which its key and value are not yet: there is NaN, as past each length."""

    cache: PagedCache
    qkv: Tensor
    counts: tuple[int, int, int]  # heads
    slots: Tensor
    lengths: Tensor
    positions: Tensor
    locations: Tensor
    table: Tensor
    norms: tuple[Tensor | None, Tensor | None]
    query_scale: Tensor | None

    @classmethod
    def make(
        cls, lengths: list[int], q_heads: int, kv_heads: int, head_size: int, page_size: int, dtype: torch.dtype, plain: bool = False
    ) -> "Rows":
        """The rows in the other order of the slots; plain: without norms, and with a factor of the queries."""
        cache = PagedCache(lengths, kv_heads, head_size, page_size, dtype, seed=head_size)
        slots = torch.arange(len(lengths), dtype=torch.int32, device=DEVICE).flip(0)
        row_lengths = torch.tensor(lengths[::-1], dtype=torch.int32, device=DEVICE)
        positions = (row_lengths - 1).clamp(min=0)
        locations = locate(cache, slots, positions)
        for contents in (cache.k_cache, cache.v_cache):
            contents.view(-1, kv_heads, head_size)[locations] = torch.nan
        norms = (None, None) if plain else (randn(head_size, seed=1, dtype=dtype), randn(head_size, seed=2, dtype=dtype))
        scale = 1 + randn(max(lengths) + 9, seed=4).abs() if plain else None
        qkv = randn(len(lengths), q_heads + 2 * kv_heads, head_size, seed=5, dtype=dtype)
        angles = 3 * randn(max(lengths) + 9, head_size // 2, seed=3)
        table = torch.cat((angles.cos(), angles.sin()), dim=1)
        return cls(cache, qkv, (q_heads, kv_heads, kv_heads), slots, row_lengths, positions, locations, table, norms, scale)

    def arguments(self, scale: float, window: int | None = None) -> tuple[object, ...]:
        """Those of the operation, up to the factor of the queries; q, k and v strided, as the layer gives them."""
        cache = self.cache
        places = self.positions, self.table, self.locations, cache.k_cache, cache.v_cache
        read = cache.page_table, self.slots, self.lengths, scale, window
        return *self.qkv.split(self.counts, dim=1), *places, *read, *self.norms, EPS, self.query_scale

    def expected(self, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
        """In float64: what attention gives, of the queries and keys rounded, and the new keys."""
        q, k, v = self.qkv.split(self.counts, dim=1)
        factor = 1.0 if self.query_scale is None else self.query_scale.double()[self.positions.long()][:, None, None]
        rotated_q = (rotated(q, self.norms[0], self.table, self.positions) * factor).to(q.dtype).double()
        rotated_k = rotated(k, self.norms[1], self.table, self.positions)
        out = torch.zeros_like(rotated_q)
        for row, (slot, length) in enumerate(zip(self.slots.tolist(), self.lengths.tolist(), strict=True)):
            if length:
                keys, values = self.cache.tokens(slot)
                keys[-1], values[-1] = rotated_k[row].to(k.dtype), v[row]
                out[row : row + 1] = attention(rotated_q[row : row + 1], keys, values, scale, window)
        return out, rotated_k


def locate(cache: PagedCache, slots: Tensor, positions: Tensor) -> Tensor:
    page_size = cache.k_cache.shape[1]
    return cache.page_table[slots.long(), (positions // page_size).long()].long() * page_size + positions % page_size


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
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64(implementation, q_heads, kv_heads, head_size, page_size, window, splits, dtype):
    rows, scale = Rows.make(LENGTHS, q_heads, kv_heads, head_size, page_size, dtype, plain=head_size == 128), head_size**-0.5
    before = [contents.flatten(0, 1).clone() for contents in (rows.cache.k_cache, rows.cache.v_cache)]
    expected, expected_k = rows.expected(scale, window)

    out = implementation(*rows.arguments(scale, window), splits)

    assert_near(out, expected, ulps=2, floor=2e-5)
    k_flat, v_flat = rows.cache.k_cache.flatten(0, 1), rows.cache.v_cache.flatten(0, 1)
    assert_near(k_flat[rows.locations], expected_k, ulps=2, floor=1e-5)
    assert v_flat[rows.locations].equal(rows.qkv[:, -kv_heads:])
    others = torch.ones(len(k_flat), dtype=torch.bool, device=DEVICE).index_fill_(0, rows.locations, False)
    for after, was in zip((k_flat, v_flat), before, strict=True):
        torch.testing.assert_close(after[others], was[others], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_caches_are_those_of_rope_and_store(implementation):
    """Where nothing is rounded, so that the order of a sum does not show."""
    rows = Rows.make([1, 17, 0, 65], 4, 2, 64, 16, torch.float32, plain=True)
    rows.qkv.copy_(torch.randint(-8, 9, rows.qkv.shape, device=DEVICE))
    rows.table.copy_(torch.randint(-8, 9, rows.table.shape, device=DEVICE))
    q, k, v, positions, table, locations, k_cache, v_cache, *_ = rows.arguments(0.1)
    own_k, own_v = k_cache.clone(), v_cache.clone()
    rope_and_store(q, k, v, positions, table, locations, own_k, own_v)
    implementation(*rows.arguments(0.1))
    for after, same in ((k_cache, own_k), (v_cache, own_v)):
        torch.testing.assert_close(after, same, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_of_length_zero_gives_zeros_and_one_of_length_one_its_value(implementation):
    rows = Rows.make([1, 0, 30], 4, 2, 64, 16, torch.float32)
    rows.qkv[1] = torch.nan  # of nobody
    room = torch.full((4, 4, 64), torch.nan, device=DEVICE)
    out = implementation(*rows.arguments(0.1))
    assert out[1].equal(torch.zeros(4, 64, device=DEVICE))
    assert_near(out[2], rows.qkv[2, -2:].repeat_interleave(2, dim=0), ulps=4)
    rotated_attention(*rows.arguments(0.1), out=room[1:])
    assert_near(room[1:], out, ulps=4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_reads_what_the_steps_before_it_stored(implementation):
    rows = Rows.make([60, 1, 64], 4, 2, 64, 16, torch.float32)
    lengths, caches = rows.lengths, (rows.cache.k_cache.clone(), rows.cache.v_cache.clone())
    for step in range(4):
        positions = lengths - 1
        rows = rows._replace(qkv=randn(3, 8, 64, seed=step), lengths=lengths, positions=positions)
        rows = rows._replace(locations=locate(rows.cache, rows.slots, positions))
        arguments = rows.arguments(0.1)
        expected = rotated_attention_torch(*arguments[:6], *caches, *arguments[8:])
        assert_near(implementation(*arguments), expected, ulps=2, floor=1e-5)
        lengths = lengths + 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows(implementation):
    rows = Rows.make([20], 4, 2, 64, 16, torch.float32)
    none = rows._replace(**{name: getattr(rows, name)[:0] for name in ("qkv", "slots", "lengths", "positions", "locations")})
    assert implementation(*none.arguments(0.1)).shape == (0, 4, 64)


@pytest.mark.parametrize(
    "rows, q_heads, kv_heads, rotated_size, within",
    [(16, 16, 8, 128, True), (17, 16, 8, 128, False), (2, 32, 8, 128, False), (1, 40, 8, 128, True), (1, 40, 8, 64, False)],
)
def test_few_rows_of_few_queries_whose_heads_rotate_whole_are_one_launch(rows, q_heads, kv_heads, rotated_size, within):
    q, k, table = (torch.empty(shape, device="meta") for shape in ((rows, q_heads, 128), (rows, kv_heads, 128), (9, rotated_size)))
    assert rotates_within(q, k, table) is within


def test_refuses_what_it_cannot_read():
    rows = Rows.make([20], 4, 2, 64, 16, torch.float32)
    q, k, v, positions, table, locations, k_cache, v_cache, *rest = rows.arguments(0.1)
    with pytest.raises(ValueError, match="last dimension of q, k and v"):
        rotated_attention(q, k.mT.contiguous().mT, v, positions, table, locations, k_cache, v_cache, *rest)
    with pytest.raises(ValueError, match="caches must be contiguous"):
        rotated_attention(q, k, v, positions, table, locations, k_cache.mT.contiguous().mT, v_cache, *rest)
    with pytest.raises(ValueError, match="all 64 dimensions of a head must rotate, got a table of 32"):
        rotated_attention(q, k, v, positions, table[:, :32], locations, k_cache, v_cache, *rest)


@pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="the reference is not split")
def test_with_fixed_splits_a_row_is_the_same_in_every_batch():
    rows = Rows.make([190, 3, 77], 6, 2, 64, 16, torch.float16)
    together = rotated_attention_triton(*rows.arguments(0.1), 4)
    for row in range(3):
        one = slice(row, row + 1)
        alone = rows._replace(**{name: getattr(rows, name)[one] for name in ("qkv", "slots", "lengths", "positions", "locations")})
        assert together[one].equal(rotated_attention_triton(*alone.arguments(0.1), 4))


@pytest.mark.skipif(not ON_GPU, reason="elsewhere programs run one after the other")
def test_the_order_in_which_shares_are_ready_does_not_show():
    rows = Rows.make([1000, 700, 3], 16, 8, 128, 16, torch.bfloat16)
    outs = [rotated_attention_triton(*rows.arguments(0.1)) for _ in range(200)]
    assert all(out.equal(outs[0]) for out in outs)


@pytest.mark.skipif(not ON_GPU, reason="takes a CUDA graph, and elsewhere a kernel ends before the next one begins")
@pytest.mark.parametrize("splits", [None, 1, 2])
def test_a_captured_launch_takes_what_comes_from_the_kernel_just_before(splits):
    """Queries, keys and values; and follows the lengths on the device."""
    rows = Rows.make([700, 300, 129, 1], 8, 2, 128, 16, torch.bfloat16)
    weight, ids = randn(20, 12 * 128, seed=1, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32, device=DEVICE)

    def step() -> Tensor:
        given = rows._replace(qkv=embedding(ids, weight, 0).view(4, 12, 128))
        return rotated_attention_triton(*given.arguments(0.1), splits)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    full = rows.lengths.clone()
    for first in range(0, 20, 4):
        lengths = (full - first).clamp(min=1)
        positions = lengths - 1
        rows.lengths.copy_(lengths)
        rows.positions.copy_(positions)
        rows.locations.copy_(locate(rows.cache, rows.slots, positions))
        ids.copy_(torch.arange(first, first + 4))
        caches = rows.cache.k_cache.clone(), rows.cache.v_cache.clone()
        graph.replay()
        arguments = rows._replace(qkv=weight[ids.long()].view(4, 12, 128)).arguments(0.1)
        assert_near(out, rotated_attention_torch(*arguments[:6], *caches, *arguments[8:]), ulps=4)
