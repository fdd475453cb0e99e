"""Causal attention of prompt chunks over the paged KV cache, which already holds the chunks' own keys and values.

T query tokens of all rows, R rows, Q and K query and KV heads of this rank, G = Q / K, H head size, P pages of N positions, S slots.

A program of the Triton kernel takes a tile of consecutive tokens of one row with the G query heads of one KV head. Tiles are counted
over all rows with an upper bound that shapes give, so the launch can be captured in a CUDA graph; the surplus programs end at once.
Hopper has a kernel of its own for what it serves: `prefill_attention_hopper`.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import HOPPER, capability, cdiv, next_power_of_2, pdl_options
from kernels.prefill_attention_hopper import is_served, prefill_attention_hopper


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    max_query: int,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """q `[T, Q, H]`, caches `[P, N, K, H]`, page_table `[S, max_pages]` int32, slots and lengths `[R]` int32 -> `[T, Q, H]`.

    The queries `query_starts[r] .. query_starts[r + 1]` (`[R + 1]` int32, at most `max_query` a row) stand at the last
    positions of the `lengths[r]` tokens of slot `slots[r]`; each attends to its own position and those before it, with a
    window to the last `window` of them. A token's result depends on its own row's positions alone, neither on the batch nor on
    how the row was cut in chunks, bit by bit on a GPU. A row of length 0 gives zeros for all its queries. N must be a power of two
    on a GPU. out: a contiguous tensor for the result.
    """
    if not q.is_cuda:
        implementation = prefill_attention_torch
    else:
        implementation = prefill_attention_hopper if is_served(q, k_cache) else prefill_attention_triton
    return implementation(q, k_cache, v_cache, page_table, slots, query_starts, lengths, max_query, scale, window, out)


def prefill_attention_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    max_query: int,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    page_size, kv_heads = k_cache.shape[1:3]
    group = q.shape[1] // kv_heads
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    out.zero_()
    starts, row_lengths = query_starts.tolist(), lengths.tolist()
    for row, length in enumerate(row_lengths):
        first, last = starts[row], starts[row + 1]
        if first == last or length == 0:
            continue
        pages = page_table[slots[row].long(), : (length + page_size - 1) // page_size].long()
        k, v = (cache[pages].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1).transpose(0, 1) for cache in (k_cache, v_cache))
        queries = q[first:last].float().transpose(0, 1)
        if last - first == length and window is None:
            heads = F.scaled_dot_product_attention(queries[None], k[None], v[None], is_causal=True, scale=scale)
        else:
            query_position = torch.arange(length - (last - first), length, device=q.device)[:, None]
            distance = query_position - torch.arange(length, device=q.device)
            allowed = (distance >= 0) & (distance < (length if window is None else window))
            heads = F.scaled_dot_product_attention(queries[None], k[None], v[None], attn_mask=allowed, scale=scale)
        out[first:last] = heads[0].transpose(0, 1).to(q.dtype)
    return out


class Config(NamedTuple):
    query_block: int  # rows of a tile: tokens times query heads of a KV head
    key_block: int  # positions of a tile
    warps: int
    stages: int


def config(head_size: int, element_bytes: int, hopper: bool) -> Config:
    """By head size and device alone: were it by the number of queries, a chunk's result would depend on its size."""
    if element_bytes == 4:
        return Config(16, 16, 4, 1)
    if not hopper:
        return Config(64, 32, 4, 2) if head_size <= 128 else Config(32, 32, 4, 2)
    if head_size <= 128:
        return Config(128, 128, 8, 3)
    return Config(128, 64, 8, 2)  # 16/8 heads of 256, 1 x 4096: 390; (128, 32, 8, 3) 311


def prefill_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    max_query: int,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
    tuned: Config | None = None,
) -> Tensor:
    (tokens, q_heads, head_size), (_, page_size, kv_heads, _), rows = q.shape, k_cache.shape, slots.shape[0]
    group = q_heads // kv_heads
    out = q.new_empty(tokens, q_heads, head_size) if out is None else out
    if tokens == 0 or rows == 0:
        return out.zero_()
    query_block, key_block, warps, stages = tuned or config(head_size, q.element_size(), capability(q.device) >= HOPPER)
    query_block = max(query_block, next_power_of_2(group))
    tile_tokens = query_block // group
    tiles = min(tokens // tile_tokens + rows, cdiv(max_query, tile_tokens) * rows)
    _prefill_attention_kernel[(kv_heads, tiles)](
        q, k_cache, v_cache, page_table, slots, query_starts, lengths, out,
        scale * math.log2(math.e), *q.stride()[:2], page_table.shape[1], tokens, rows, window or 0,
        kv_heads, group, head_size, page_size, window is not None, tile_tokens, next_power_of_2(rows),
        query_block, next_power_of_2(head_size), key_block, stages, num_warps=warps, **pdl_options(q.device),
    )  # fmt: skip
    return out


@triton.jit
def _prefill_attention_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, page_table_ptr, slots_ptr, query_starts_ptr, lengths_ptr, out_ptr,
    scale_log2, q_token_stride, q_head_stride, max_pages, tokens, rows, window,
    K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr,
    ROWS_BLOCK: tl.constexpr, QUERY_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kv_head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)  # the long tiles of a row first
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # n rows with t tokens have at most t // TOKENS + n tiles. A program past that ends at once: in a captured step, whose rows are a
    # bound too, there are many. `past` is a row before which n are: when none from there on has tokens, nothing is left for this tile.
    past = tile - tokens // TOKENS
    if (past >= 0) & (tl.load(query_starts_ptr + tl.minimum(tl.maximum(past, 0), rows)) == tl.load(query_starts_ptr + rows)):
        return
    # Row r has `ceil(queries / TOKENS)` tiles, after those of the rows before it. All rows are read at once, in one latency.
    index = tl.arange(0, ROWS_BLOCK)
    in_rows = index < rows
    starts = tl.load(query_starts_ptr + index, mask=in_rows, other=0)
    queries = tl.load(query_starts_ptr + index + 1, mask=in_rows, other=0) - starts
    lengths = tl.load(lengths_ptr + index, mask=in_rows, other=0)
    slots = tl.load(slots_ptr + index, mask=in_rows, other=0)
    row_tiles = (queries + TOKENS - 1) // TOKENS
    last_tile = tl.cumsum(row_tiles, axis=0)
    is_row = (last_tile > tile) & (last_tile - row_tiles <= tile)
    num_queries = tl.sum(tl.where(is_row, queries, 0), axis=0)
    if num_queries > 0:
        tile -= tl.sum(tl.where(is_row, last_tile - row_tiles, 0), axis=0)
        first_query = tl.sum(tl.where(is_row, starts, 0), axis=0)
        length = tl.sum(tl.where(is_row, lengths, 0), axis=0)
        slot = tl.sum(tl.where(is_row, slots, 0), axis=0).to(tl.int64)
        pages_ptr = page_table_ptr + slot * max_pages

        packed, dimension = tl.arange(0, QUERY_BLOCK), tl.arange(0, HEAD_BLOCK)
        token = tile * TOKENS + packed // G  # within the row's queries
        head = kv_head * G + packed % G
        query_position = length - num_queries + token
        inside_query = (token < num_queries) & (packed < TOKENS * G)
        inside_q = inside_query[:, None] & (dimension < H)[None, :]
        global_token = (first_query + token).to(tl.int64)
        q_place = global_token * q_token_stride + head * q_head_stride
        q = tl.load(q_ptr + q_place[:, None] + dimension[None, :], mask=inside_q, other=0.0)

        first_position = length - num_queries + tile * TOKENS  # of the tile's first token: all its tokens see up to here
        end = tl.minimum(first_position + TOKENS, length)
        begin = 0
        open_end = tl.maximum(first_position + 1, 0)  # all the tile's tokens see the positions before it; of a row without any, none
        if WINDOW:
            begin = tl.maximum(first_position - window + 1, 0)
            open_end = begin  # a window is short: one loop, with the mask
        begin, open_end = begin // BLOCK * BLOCK, open_end // BLOCK * BLOCK

        best = tl.full([QUERY_BLOCK], -1e30, tl.float32)
        total = tl.zeros([QUERY_BLOCK], tl.float32)
        weighted = tl.zeros([QUERY_BLOCK, HEAD_BLOCK], tl.float32)
        if not WINDOW:
            best, total, weighted = _attend(
                q, best, total, weighted, k_cache_ptr, v_cache_ptr, pages_ptr, begin, open_end, query_position, length, window,
                scale_log2, kv_head, K, H, N, WINDOW, False, HEAD_BLOCK, BLOCK, STAGES,
            )  # fmt: skip
        best, total, weighted = _attend(
            q, best, total, weighted, k_cache_ptr, v_cache_ptr, pages_ptr, open_end, end, query_position, length, window,
            scale_log2, kv_head, K, H, N, WINDOW, True, HEAD_BLOCK, BLOCK, STAGES,
        )  # fmt: skip
        out_place = (global_token * K * G + head)[:, None] * H + dimension[None, :]
        tl.store(out_ptr + out_place, weighted / tl.where(total > 0, total, 1.0)[:, None], mask=inside_q)


@triton.jit
def _attend(
    q, best, total, weighted, k_cache_ptr, v_cache_ptr, pages_ptr, begin, end, query_position, length, window, scale_log2, kv_head,
    K: tl.constexpr, H: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds the positions `begin .. end` to the online softmax; MASKED where some query of the tile must not see some of them."""
    dimension = tl.arange(0, HEAD_BLOCK)
    in_head = dimension[None, :] < H
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        position = start + tl.arange(0, BLOCK)
        if MASKED:
            in_row = position < length
            page = tl.load(pages_ptr + position // N, mask=in_row, other=0).to(tl.int64)
            in_tile = in_row[:, None] & in_head
        else:
            page = tl.load(pages_ptr + position // N).to(tl.int64)
            in_tile = in_head if H < HEAD_BLOCK else None
        place = ((page * N + position % N) * K + kv_head)[:, None] * H + dimension[None, :]
        k = tl.load(k_cache_ptr + place, mask=in_tile, other=None if in_tile is None else 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = position[None, :] <= query_position[:, None]
            if WINDOW:
                seen &= position[None, :] > query_position[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))  # finite, so that nothing seen yet is not -inf minus -inf
        # Scaled here and not before the mask, so that tiles with and without one compute the same bits.
        weights = tl.exp2(scores * scale_log2 - (new_best * scale_log2)[:, None])
        shrink = tl.exp2((best - new_best) * scale_log2)  # not of two products: fused, equal ones would differ by a rounding
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(v_cache_ptr + place, mask=in_tile, other=None if in_tile is None else 0.0)
        weighted = tl.dot(weights.to(v.dtype), v, weighted * shrink[:, None], input_precision="ieee")
        best = new_best
    return best, total, weighted
