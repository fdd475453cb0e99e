"""Attention of one query token a row over its paged KV cache: split over the positions, the query heads of a KV head packed.

B rows, Q and K query and KV heads of this rank, G = Q / K, H head size, P pages of N positions, S slots.

Every program reads a share of one row's positions for one KV head, so that each key and value is read once for its G query
heads. A row that is cut in several shares is put together by the program that finishes last: no second launch. The grid
depends on shapes alone (`kernels.decode_splits`), the shares on the lengths that the device holds, so the launch can be captured in a CUDA
graph.
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.decode_splits import Config, cut
from kernels.launch import counters, pdl_options, prefetch_line

NO_WINDOW = 2**31 - 1


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    splits: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """q `[B, Q, H]`, caches `[P, N, K, H]`, page_table `[S, max_pages]` int32, slots and lengths `[B]` int32 -> `[B, Q, H]`.

    Row b attends to the first `lengths[b]` positions of slot `slots[b]`, its own token included; with a window to the last
    `window` of them. Length 0 gives zeros. Whatever lies in pages or table entries past the length is never used.
    splits: shares that a row is cut into at most, chosen by shape if None; with a fixed number a row's result does not depend
    on the batch, and never on the order in which shares are ready. On a GPU, calls on different streams of one device must not
    overlap, since they share counters; slots, lengths and page_table must not come from the two kernels just before; N must be a
    power of two.
    out: a contiguous tensor for the result.
    """
    if q.is_cuda:
        return decode_attention_triton(q, k_cache, v_cache, page_table, slots, lengths, scale, window, splits, out)
    result = decode_attention_torch(q, k_cache, v_cache, page_table, slots, lengths, scale, window)
    return result if out is None else out.copy_(result)


def decode_attention_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    (rows, q_heads, head_size), (_, page_size, kv_heads, _) = q.shape, k_cache.shape
    if rows == 0:
        return q.clone()
    num_pages = -(-max(int(lengths.max()), 1) // page_size)
    position = torch.arange(num_pages * page_size, device=q.device)
    inside = position < lengths[:, None]
    if window is not None:
        inside &= position >= lengths[:, None] - window
    pages = page_table[slots.long(), :num_pages].where(inside.view(rows, num_pages, page_size).any(dim=2), 0).flatten()
    k, v = (cache.flatten(1).index_select(0, pages).view(-1, kv_heads * head_size).float() for cache in (k_cache, v_cache))
    for x in (k, v):  # what lies outside may hold NaN, which a mask that is added does not remove
        x.index_fill_(0, (~inside).flatten().nonzero()[:, 0], 0.0)
    k, v = (x.view(rows, -1, kv_heads, head_size).transpose(1, 2) for x in (k, v))
    # The query heads that share a KV head take the place of query tokens.
    grouped = q.reshape(rows, kv_heads, -1, head_size).float()
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=inside[:, None, None], scale=scale)
    return out.reshape(rows, q_heads, head_size).masked_fill_((lengths == 0)[:, None, None], 0.0).to(q.dtype)


def decode_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    splits: int | None = None,
    out: Tensor | None = None,
    tuned: Config | None = None,
) -> Tensor:
    (rows, q_heads, head_size), (_, page_size, kv_heads, _), max_pages = q.shape, k_cache.shape, page_table.shape[1]
    group = q_heads // kv_heads
    out = q.new_empty(rows, q_heads, head_size) if out is None else out
    if rows == 0:
        return out
    tuned, partial, chunk, heads_block, head_block = cut(q, kv_heads, max_pages * page_size, splits, tuned)
    _decode_attention_kernel[(kv_heads, rows, tuned.splits)](
        q, k_cache, v_cache, page_table, slots, lengths, out, partial, counters(q.device),
        scale * math.log2(math.e), *q.stride()[:2], max_pages, window or NO_WINDOW, tuned.splits, tuned.least_tiles,
        kv_heads, group, head_size, page_size, tuned.splits > 1, tuned.splits == 2, chunk, heads_block, max(heads_block, 16), head_block,
        tuned.block, tuned.stages, num_warps=tuned.warps, **pdl_options(q.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["window", "splits", "least_tiles"])  # one kernel for all of them
def _decode_attention_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, page_table_ptr, slots_ptr, lengths_ptr, out_ptr, partial_ptr, counters_ptr,
    scale_log2, q_row_stride, q_head_stride, max_pages, window, splits, least_tiles,
    K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr, IN_TWO: tl.constexpr, CHUNK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    kv_head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths_ptr + row)
    pages_ptr = page_table_ptr + tl.load(slots_ptr + row).to(tl.int64) * max_pages
    begin, end, shares = share_of(tl.maximum(length - window, 0), length, split, splits, least_tiles, BLOCK)
    if split >= shares:
        return  # a row's first program always waits, so what follows this kernel cannot start before its turn
    page = page_ids(pages_ptr, begin, end, N, BLOCK)
    if PDL:
        if IN_TWO:  # with one share there is no time left in the memory, with more each is short: slower both
            ask_ahead(k_cache_ptr, v_cache_ptr, pages_ptr, begin, end, kv_head, K, H, N, BLOCK)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head, dimension = tl.arange(0, GROUP_BLOCK), tl.arange(0, HEAD_BLOCK)
    inside_head = (head < G)[:, None] & (dimension < H)[None, :]
    q_place = row * q_row_stride + (kv_head * G + head)[:, None] * q_head_stride + dimension[None, :]
    q = tl.load(q_ptr + q_place, mask=inside_head, other=0.0)

    best = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    totals = tl.zeros([GROUP_BLOCK, BLOCK], tl.float32)
    weighted = tl.zeros([GROUP_BLOCK, HEAD_BLOCK], tl.float32)
    best, total, weighted = attend_tiles(
        q, best, totals, weighted, page, k_cache_ptr, v_cache_ptr, pages_ptr, begin, end, kv_head, scale_log2,
        K, H, N, HEAD_BLOCK, BLOCK, STAGES,
    )  # fmt: skip
    leave_share(
        out_ptr, partial_ptr, counters_ptr, best, total, weighted, row, kv_head, split, shares, splits,
        K, G, H, SPLIT, CHUNK, HEADS_BLOCK, GROUP_BLOCK, HEAD_BLOCK,
    )  # fmt: skip


@triton.jit
def share_of(first, last, split, splits, least_tiles, BLOCK: tl.constexpr):
    """Where the share `split` of the positions `[first, last)` begins and ends, and how many shares there are: at most `splits`."""
    share = tl.maximum(tl.cdiv(tl.cdiv(last - first, BLOCK), splits), least_tiles) * BLOCK
    shares = tl.maximum(tl.cdiv(last - first, share), 1)  # no position is one empty share
    begin = first + split * share
    return begin, tl.minimum(begin + share, last), shares


@triton.jit
def attend_tiles(
    q, best, totals, weighted, page, k_cache_ptr, v_cache_ptr, pages_ptr, begin, end, kv_head, scale_log2,
    K: tl.constexpr, H: tl.constexpr, N: tl.constexpr, HEAD_BLOCK: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The online softmax goes on over the positions `[begin, end)`: best score, sum of the weights, weighted values.

    totals `[heads, BLOCK]` are added up at the end: in the loop warps would wait for each other. page: of the first tile.
    """
    dimension = tl.arange(0, HEAD_BLOCK)
    # Page ids come a tile before the loads that need them: if a load waited for another, each would get half of the stages.
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        position = start + tl.arange(0, BLOCK)
        inside = position < end
        place = ((page.to(tl.int64) * N + position % N) * K + kv_head)[:, None] * H + dimension[None, :]
        inside_tile = inside[:, None] & (dimension < H)[None, :]
        k = tl.load(k_cache_ptr + place, mask=inside_tile, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        totals = totals * shrink[:, None] + weights
        v = tl.load(v_cache_ptr + place, mask=inside_tile, other=0.0)
        weighted = tl.dot(weights.to(v.dtype), v, weighted * shrink[:, None], input_precision="ieee")
        best = new_best
        page = page_ids(pages_ptr, start + BLOCK, end, N, BLOCK)
    return best, tl.sum(totals, axis=1), weighted


@triton.jit
def leave_share(
    out_ptr, partial_ptr, counters_ptr, best, total, weighted, row, kv_head, split, shares, splits,
    K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes what comes of a share: the result if it is the only one, else what the program that finishes last puts together."""
    head, dimension = tl.arange(0, GROUP_BLOCK), tl.arange(0, HEAD_BLOCK)
    inside_head = (head < G)[:, None] & (dimension < H)[None, :]
    if shares == 1:
        out_place = (row * K * G + kv_head * G + head)[:, None] * H + dimension[None, :]
        result = weighted / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + out_place, result, mask=inside_head)
    elif SPLIT:
        # Per (row, KV head): weighted [splits, G, H], best [splits, G], total [splits, G].
        group_ptr = partial_ptr + (row * K + kv_head) * (splits * G * (H + 2))
        best_ptr, total_ptr = group_ptr + splits * G * H, group_ptr + splits * G * (H + 1)
        tl.store(group_ptr + (split * G + head)[:, None] * H + dimension[None, :], weighted, mask=inside_head)
        tl.store(best_ptr + split * G + head, best, mask=head < G)
        tl.store(total_ptr + split * G + head, total, mask=head < G)
        tl.debug_barrier()  # all threads' stores before the one thread's release
        counter_ptr = counters_ptr + row * K + kv_head
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == shares - 1:
            tl.store(counter_ptr, 0)
            out_ptr += (row * K + kv_head) * (G * H)
            _combine(out_ptr, group_ptr, best_ptr, total_ptr, shares, G, H, CHUNK, HEADS_BLOCK, HEAD_BLOCK)


@triton.jit
def page_ids(pages_ptr, start, end, N: tl.constexpr, BLOCK: tl.constexpr):
    """Of a tile's positions, `[BLOCK]`."""
    position = start + tl.arange(0, BLOCK)
    return tl.load(pages_ptr + position // N, mask=position < end, other=0)


@triton.jit
def _combine(
    out_ptr, weighted_ptr, best_ptr, total_ptr, shares, G: tl.constexpr, H: tl.constexpr,
    CHUNK: tl.constexpr, HEADS_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
):  # fmt: skip
    """Puts the shares of a row and KV head together, in a fixed order: `[shares, G, H]`, `[shares, G]` and `[shares, G]` -> `[G, H]`.

    Heads are padded to a power of two, not to the 16 of a tensor core's tile: all threads share these few. CHUNK shares are one
    tensor, so that their loads go out together: between those of two tensors Triton puts barriers that wait for the first.
    """
    head, dimension = tl.arange(0, HEADS_BLOCK), tl.arange(0, HEAD_BLOCK)
    best = tl.full([HEADS_BLOCK], -1e38, tl.float32)
    total = tl.zeros([HEADS_BLOCK], tl.float32)
    weighted = tl.zeros([HEADS_BLOCK, HEAD_BLOCK], tl.float32)
    for first in tl.range(0, shares, CHUNK, num_stages=1):
        share = first + tl.arange(0, CHUNK)
        present = (share < shares)[:, None] & (head < G)[None, :]
        inside = present[:, :, None] & (dimension < H)[None, None, :]
        place = share[:, None] * G + head[None, :]
        each = tl.load(weighted_ptr + place[:, :, None] * H + dimension[None, None, :], mask=inside, other=0.0, cache_modifier=".cg")
        bests = tl.load(best_ptr + place, mask=present, other=-1e38, cache_modifier=".cg")
        totals = tl.load(total_ptr + place, mask=present, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, tl.max(bests, axis=0))
        shrink, factors = tl.exp2(best - new_best), tl.exp2(bests - new_best[None, :])
        total = total * shrink + tl.sum(totals * factors, axis=0)
        weighted = weighted * shrink[:, None] + tl.sum(each * factors[:, :, None], axis=0)
        best = new_best
    inside_head = (head < G)[:, None] & (dimension < H)[None, :]
    result = weighted / tl.where(total > 0, total, 1.0)[:, None]  # heads of the padding have no total
    tl.store(out_ptr + head[:, None] * H + dimension[None, :], result, mask=inside_head)


@triton.jit
def ask_ahead(
    k_cache_ptr, v_cache_ptr, pages_ptr, begin, end, kv_head,
    K: tl.constexpr, H: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Asks for keys and values of a share's first tile. The newest may still be written: the cache that they come into sees that.

    Keys and values are halves of one vector, so that no two threads ask for the same.
    """
    ROW_BYTES: tl.constexpr = H * (k_cache_ptr.dtype.element_ty.primitive_bitwidth // 8)
    index = tl.arange(0, 2 * BLOCK)
    position = begin + index % BLOCK
    inside = position < end
    page = tl.load(pages_ptr + position // N, mask=inside, other=0).to(tl.int64)
    cache = tl.where(index < BLOCK, k_cache_ptr.to(tl.int64), v_cache_ptr.to(tl.int64))
    address = cache + ((page * N + position % N) * K + kv_head) * ROW_BYTES
    for line in tl.static_range(0, ROW_BYTES, 128):
        prefetch_line(address + line, inside)
