from typing import Any, NamedTuple

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

    def arguments(self, scale: float = 0.1, window: int | None = None) -> dict[str, Any]:
        """Those of the operation; q, k and v strided, as the layer gives them."""
        given = {name: getattr(self, name) for name in ("positions", "table", "locations", "slots", "lengths", "query_scale")}
        caches = {name: getattr(self.cache, name) for name in ("k_cache", "v_cache", "page_table")}
        heads = dict(zip("qkv", self.qkv.split(self.counts, dim=1), strict=True))
        norms = dict(zip(("q_norm", "k_norm"), self.norms, strict=True))
        return {**heads, **given, **caches, **norms, "scale": scale, "window": window, "eps": EPS}

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
    page_size = int(cache.k_cache.shape[1])
    pages: Tensor = cache.page_table[slots.long(), (positions // page_size).long()].long()
    return pages * page_size + positions % page_size


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

    out = implementation(**rows.arguments(scale, window), splits=splits)

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
    arguments = rows.arguments()
    own_k, own_v = rows.cache.k_cache.clone(), rows.cache.v_cache.clone()
    own = {name: arguments[name] for name in ("q", "k", "v", "positions", "table", "locations")}
    rope_and_store(**own, k_cache=own_k, v_cache=own_v)
    implementation(**arguments)
    for after, same in ((rows.cache.k_cache, own_k), (rows.cache.v_cache, own_v)):
        torch.testing.assert_close(after, same, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_of_length_zero_gives_zeros_and_one_of_length_one_its_value(implementation):
    rows = Rows.make([1, 0, 30], 4, 2, 64, 16, torch.float32)
    rows.qkv[1] = torch.nan  # of nobody
    room = torch.full((4, 4, 64), torch.nan, device=DEVICE)
    out = implementation(**rows.arguments())
    assert out[1].equal(torch.zeros(4, 64, device=DEVICE))
    assert_near(out[2], rows.qkv[2, -2:].repeat_interleave(2, dim=0), ulps=4)
    rotated_attention(**rows.arguments(), out=room[1:])
    assert_near(room[1:], out, ulps=4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_reads_what_the_steps_before_it_stored(implementation):
    rows = Rows.make([60, 1, 64], 4, 2, 64, 16, torch.float32)
    caches = {name: getattr(rows.cache, name).clone() for name in ("k_cache", "v_cache")}
    for step in range(4):
        rows = rows._replace(qkv=randn(3, 8, 64, seed=step), locations=locate(rows.cache, rows.slots, rows.positions))
        expected = rotated_attention_torch(**{**rows.arguments(), **caches})
        assert_near(implementation(**rows.arguments()), expected, ulps=2, floor=2e-5)
        rows = rows._replace(lengths=rows.lengths + 1, positions=rows.positions + 1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_rows(implementation):
    rows = Rows.make([20], 4, 2, 64, 16, torch.float32)
    none = rows._replace(**{name: getattr(rows, name)[:0] for name in ("qkv", "slots", "lengths", "positions", "locations")})
    assert implementation(**none.arguments()).shape == (0, 4, 64)


@pytest.mark.parametrize(
    "rows, q_heads, kv_heads, rotated_size, within",
    [
        (2, 16, 8, 128, True),
        (16, 32, 8, 128, True),
        (17, 16, 8, 128, False),
        (2, 40, 8, 128, False),
        (1, 16, 8, 128, False),
        (2, 16, 8, 64, False),
    ],
)
def test_few_rows_of_few_queries_whose_heads_rotate_whole_are_one_launch(rows, q_heads, kv_heads, rotated_size, within):
    q, cache, table = torch.empty(rows, q_heads, 128), torch.empty(1, 16, kv_heads, 128), torch.empty(9, rotated_size)
    assert rotates_within(q, cache, table, torch.zeros(2, 64)) is within


def test_the_table_says_whether_the_rotation_is_within(table):
    q, cache, turns = (torch.empty(shape, device=DEVICE, dtype=torch.float16) for shape in ((8, 16, 128), (1, 16, 8, 128), (9, 128)))
    pages = torch.zeros(2, 64, device=DEVICE)
    table["decode_attention"] = {"16x8x128": {"4": [64, 4, 2, 6, 3, 0], "8": [64, 4, 2, 6, 3, 1]}}
    assert [rotates_within(q[:rows], cache, turns, pages) for rows in (4, 5, 8)] == [False, True, True]


def test_refuses_what_it_cannot_read():
    rows = Rows.make([20], 4, 2, 64, 16, torch.float32)
    arguments = rows.arguments()
    with pytest.raises(ValueError, match="last dimension of q, k and v"):
        rotated_attention(**{**arguments, "k": arguments["k"].mT.contiguous().mT})
    with pytest.raises(ValueError, match="caches must be contiguous"):
        rotated_attention(**{**arguments, "k_cache": arguments["k_cache"].mT.contiguous().mT})
    with pytest.raises(ValueError, match="all 64 dimensions of a head must rotate, got a table of 32"):
        rotated_attention(**{**arguments, "table": arguments["table"][:, :32]})


@pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="the reference is not split")
def test_with_fixed_splits_a_row_is_the_same_in_every_batch():
    rows = Rows.make([190, 3, 77], 6, 2, 64, 16, torch.float16)
    together = rotated_attention_triton(**rows.arguments(), splits=4)
    for row in range(3):
        one = slice(row, row + 1)
        alone = rows._replace(**{name: getattr(rows, name)[one] for name in ("qkv", "slots", "lengths", "positions", "locations")})
        assert together[one].equal(rotated_attention_triton(**alone.arguments(), splits=4))


@pytest.mark.skipif(not ON_GPU, reason="elsewhere programs run one after the other")
def test_the_order_in_which_shares_are_ready_does_not_show():
    rows = Rows.make([1000, 700, 3], 16, 8, 128, 16, torch.bfloat16)
    outs = [rotated_attention_triton(**rows.arguments()) for _ in range(200)]
    assert all(out.equal(outs[0]) for out in outs)


@pytest.mark.skipif(not ON_GPU, reason="takes a CUDA graph, and elsewhere a kernel ends before the next one begins")
@pytest.mark.parametrize("splits", [None, 1, 2])
def test_a_captured_launch_takes_what_comes_from_the_kernel_just_before(splits):
    """Queries, keys and values; and follows the lengths on the device."""
    rows = Rows.make([700, 300, 129, 1], 8, 2, 128, 16, torch.bfloat16)
    weight, ids = randn(20, 12 * 128, seed=1, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32, device=DEVICE)

    def step() -> Tensor:
        given = rows._replace(qkv=embedding(ids, weight, 0).view(4, 12, 128))
        return rotated_attention_triton(**given.arguments(), splits=splits)

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
        caches = {name: getattr(rows.cache, name).clone() for name in ("k_cache", "v_cache")}
        graph.replay()
        given = rows._replace(qkv=weight[ids.long()].view(4, 12, 128))
        assert_near(out, rotated_attention_torch(**{**given.arguments(), **caches}), ulps=4)
