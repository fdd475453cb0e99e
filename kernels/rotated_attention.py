"""A decode layer's rotation and attention in one launch: per-head norm of q and k, RoPE, the KV store, then attention of the rows.

B rows of one new token each, Q and K query and KV heads of this rank, G = Q / K, H head size, all of it rotated, P pages of N positions,
S slots, L table length.

The programs are those of `kernels.decode_attention`. Each norms and rotates the few query heads that it attends with. The program
of a row's last share also norms, rotates and stores the newest key, and begins its softmax with that position, which it has in registers:
so no program reads what another one of the launch writes, and what is read of the cache is older than the kernel before this one.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from kernels.decode_attention import NO_WINDOW, attend_tiles, decode_attention_torch, leave_share, page_ids, share_of
from kernels.decode_splits import Config, config, cut
from kernels.launch import counters, pdl_options
from kernels.rope import check_strides, rope_and_store_torch


def rotates_within(q: Tensor, k_cache: Tensor, table: Tensor, page_table: Tensor) -> bool:
    """q `[B, Q, H]`, k_cache `[P, N, K, H]`, table `[L, R]`: whether one launch is faster than two for these shapes; only where R is H."""
    (rows, q_heads, head_size), (_, page_size, kv_heads, _) = q.shape, k_cache.shape
    if table.shape[1] != head_size or rows == 0:
        return False
    return config(q.device, q.dtype, rows, q_heads, kv_heads, head_size, page_table.shape[1] * page_size).rotates == 1


def rotated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor,
    locations: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    query_scale: Tensor | None = None,
    splits: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """q `[B, Q, H]`, k and v `[B, K, H]`, before the rotation -> `[B, Q, H]`; writes the rows' keys and values to the caches.

    `kernels.rope.rope_and_store`, then `kernels.decode_attention.decode_attention`: see there for all arguments. The table is `[L, H]`, and
    locations must be those of position `lengths[b] - 1` of slot `slots[b]`; a row of length 0 writes to its location, too.
    On a GPU positions, locations, slots, lengths and page_table must not come from the kernel just before.
    Raises ValueError for strides that rope_and_store does not take, a cache that is not contiguous, and another table.
    """
    check_strides(q, k, v, k_cache, v_cache)
    if table.shape[1] != q.shape[2]:
        raise ValueError(f"all {q.shape[2]} dimensions of a head must rotate, got a table of {table.shape[1]}")
    implementation = rotated_attention_triton if q.is_cuda else rotated_attention_torch
    return implementation(
        q, k, v, positions, table, locations, k_cache, v_cache, page_table, slots, lengths, scale, window,
        q_norm, k_norm, eps, query_scale, splits, out,
    )  # fmt: skip


def rotated_attention_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor,
    locations: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    query_scale: Tensor | None = None,
    splits: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """splits: of no use here."""
    q = rope_and_store_torch(q, k, v, positions, table, locations, k_cache, v_cache, q_norm, k_norm, eps, query_scale)
    result = decode_attention_torch(q, k_cache, v_cache, page_table, slots, lengths, scale, window)
    return result if out is None else out.copy_(result)


def rotated_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor,
    locations: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    query_scale: Tensor | None = None,
    splits: int | None = None,
    out: Tensor | None = None,
    tuned: Config | None = None,
) -> Tensor:
    (rows, q_heads, head_size), (_, page_size, kv_heads, _), max_pages = q.shape, k_cache.shape, page_table.shape[1]
    out = q.new_empty(rows, q_heads, head_size) if out is None else out
    if rows == 0:
        return out
    tuned, partial, chunk, heads_block, head_block = cut(q, kv_heads, max_pages * page_size, splits, tuned)
    _rotated_attention_kernel[(kv_heads, rows, tuned.splits)](
        q, k, v, positions, table, locations, k_cache, v_cache, page_table, slots, lengths, q_norm, k_norm, query_scale,
        out, partial, counters(q.device), scale * math.log2(math.e), eps,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], max_pages, window or NO_WINDOW, tuned.splits, tuned.least_tiles,
        kv_heads, q_heads // kv_heads, head_size, page_size, q_norm is not None, k_norm is not None, query_scale is not None,
        tuned.splits > 1, chunk, heads_block, max(heads_block, tuned.warps), max(heads_block, 16), head_block,
        tuned.block, tuned.stages, num_warps=tuned.warps, **pdl_options(q.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["window", "splits", "least_tiles"])  # one kernel for all of them
def _rotated_attention_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, table_ptr, locations_ptr, k_cache_ptr, v_cache_ptr, page_table_ptr, slots_ptr, lengths_ptr,
    q_norm_ptr, k_norm_ptr, query_scale_ptr, out_ptr, partial_ptr, counters_ptr, scale_log2, eps,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride, max_pages, window, splits,
    least_tiles,
    K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, SCALED: tl.constexpr,
    SPLIT: tl.constexpr, CHUNK: tl.constexpr, HEADS_BLOCK: tl.constexpr, ROTATED_BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kv_head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    pages_ptr = page_table_ptr + tl.load(slots_ptr + row).to(tl.int64) * max_pages
    last = tl.maximum(length - 1, 0)  # the newest position does not come from the cache
    begin, end, shares = share_of(tl.maximum(length - window, 0), last, split, splits, least_tiles, BLOCK)
    if split >= shares:
        return  # a row's first program always waits, so what follows this kernel cannot start before its turn
    page = page_ids(pages_ptr, begin, end, N, BLOCK)

    # A head a warp at least: then no warp waits for another one's part of a norm.
    head = tl.arange(0, ROTATED_BLOCK)[:, None]
    dimension = tl.broadcast_to(tl.arange(0, HEAD_BLOCK)[None, :], [ROTATED_BLOCK, HEAD_BLOCK])
    inside = dimension < H
    position = tl.load(positions_ptr + row)
    angle_ptr = table_ptr + position.to(tl.int64) * H + dimension % (H // 2)
    cos = tl.load(angle_ptr, mask=inside, other=0.0)
    sin = tl.load(angle_ptr + H // 2, mask=inside, other=0.0)
    sin = tl.where(dimension < H // 2, -sin, sin)
    q_weight, q_paired_weight, k_weight, k_paired_weight, factor = 1.0, 1.0, 1.0, 1.0, 1.0
    if Q_NORM:
        q_weight, q_paired_weight = _pairs(q_norm_ptr, dimension, inside, H)
    if K_NORM:
        k_weight, k_paired_weight = _pairs(k_norm_ptr, dimension, inside, H)
    if SCALED:
        factor = tl.load(query_scale_ptr + position)
    newest = split == shares - 1
    inside_newest = inside & newest
    place = (tl.load(locations_ptr + row) * K + kv_head) * H + dimension
    q_ptr += row * q_row_stride + (kv_head * G + head) * q_head_stride
    k_ptr += row * k_row_stride + kv_head * k_head_stride
    v_ptr += row * v_row_stride + kv_head * v_head_stride
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    q, q_paired = _pairs(q_ptr, dimension, inside & (head < G), H)
    k, k_paired = _pairs(k_ptr, dimension, inside_newest, H)
    v = tl.load(v_ptr + dimension, mask=inside_newest, other=0.0).to(v_cache_ptr.dtype.element_ty)
    q = (_rotate(q, q_paired, q_weight, q_paired_weight, cos, sin, eps, H, Q_NORM) * factor).to(k_cache_ptr.dtype.element_ty)
    k = _rotate(k, k_paired, k_weight, k_paired_weight, cos, sin, eps, H, K_NORM).to(k_cache_ptr.dtype.element_ty)
    tl.store(k_cache_ptr + place, k, mask=inside_newest & (head == 0))
    tl.store(v_cache_ptr + place, v, mask=inside_newest & (head == 0))

    # The softmax begins with the newest position: its score is the best so far, its weight 1.
    attended = newest & (length > 0)
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale_log2
    best = tl.reshape(_repeat(tl.where(attended, score, float("-inf"))[:, None], GROUP_BLOCK), [GROUP_BLOCK])
    column = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], [GROUP_BLOCK, BLOCK])
    totals = tl.where(attended & (column == 0), 1.0, 0.0)
    weighted = _repeat(tl.where(attended, v.to(tl.float32), 0.0), GROUP_BLOCK)
    best, total, weighted = attend_tiles(
        _repeat(q, GROUP_BLOCK), best, totals, weighted, page, k_cache_ptr, v_cache_ptr, pages_ptr, begin, end, kv_head, scale_log2,
        K, H, N, HEAD_BLOCK, BLOCK, STAGES,
    )  # fmt: skip
    leave_share(
        out_ptr, partial_ptr, counters_ptr, best, total, weighted, row, kv_head, split, shares, splits,
        K, G, H, SPLIT, CHUNK, HEADS_BLOCK, GROUP_BLOCK, HEAD_BLOCK,
    )  # fmt: skip


@triton.jit
def _pairs(source, dimension, inside, H: tl.constexpr):
    """The values of these dimensions and those that they are rotated with, in float32: loaded twice, so that no tensor has to be cut."""
    partner = (dimension + H // 2) % H
    x = tl.load(source + dimension, mask=inside, other=0.0).to(tl.float32)
    return x, tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _rotate(x, paired, weight, paired_weight, cos, sin, eps, H: tl.constexpr, NORM: tl.constexpr):
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / H + eps)[:, None]
        x *= scale * weight
        paired *= scale * paired_weight
    return x * cos + paired * sin


@triton.jit
def _repeat(x, ROWS: tl.constexpr):
    """`[n, m]` -> `[ROWS, m]`: a tensor core's tile has more rows than there are heads, and what stands in the others is never used."""
    FEW: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[None, :, :], [ROWS // FEW, FEW, SIZE]), [ROWS, SIZE])
