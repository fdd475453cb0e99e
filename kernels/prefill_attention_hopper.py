"""The kernel of `prefill_attention` for Hopper, in Gluon: the copy engine fetches pages while warp groups multiply.

Letters as in `prefill_attention`. A program stays for many tiles. One of its warps fetches the pages of keys and values, a block of
positions after the other, into a ring of buffers; two or three groups of four warps take 64 of a tile's rows each. A group starts the
product of queries and the next keys before it has the weights of the block before multiplied with their values, and computes its
softmax while the latter goes on. All of a row's blocks come in the order of their positions, whatever tile it stands in.
"""

import math
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.launch import HOPPER, capability, cdiv, multiprocessors, next_power_of_2, pdl_options

HEAD_SIZES = (64, 128)
LEAST_PAGE_SIZE = 8  # positions: the swizzle of a buffer repeats after as many
LEAST_ROWS_BLOCK = 64  # so that few numbers of rows need kernels of their own
GROUP_ROWS = gl.constexpr(64)  # packed rows of a tile, for each of the warp groups: what one instruction multiplies
BOX_COLUMNS = gl.constexpr(64)  # of a buffer that the copy engine writes at once: 128 bytes
BOX_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


class HopperConfig(NamedTuple):
    groups: int  # warp groups that multiply
    block: int  # positions of a step
    stages: int  # blocks of keys, and of values, that there are buffers for


# For any number of queries: were it by that, a chunk's result would depend on its size. H200, bfloat16, TFLOP/s at 1 x 8192, 16 x 1024 and
# 64 x 256 tokens: 32/8 heads of 64: 425, 312, 128; (3, 128, 2) 437, 243, 98. 40/8 heads of 128, when groups went on to their tile's end:
# 594, 406, 167; (2, 128, 2) 561, 310, 136; (2, 64, 4) 512, 376, 169.
CONFIG = HopperConfig(groups=3, block=64, stages=3)


def is_served(q: Tensor, k_cache: Tensor) -> bool:
    """Whether the kernel takes such queries and pages, on this GPU. By the model and the GPU, never by the batch."""
    page_size, head_size = k_cache.shape[1], k_cache.shape[3]
    return (
        capability(q.device)[0] == HOPPER[0]
        and q.element_size() == 2
        and head_size in HEAD_SIZES
        and page_size >= LEAST_PAGE_SIZE
        and q.shape[1] // k_cache.shape[2] <= CONFIG.groups * GROUP_ROWS.value
    )


def prefill_attention_hopper(
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
    tuned: HopperConfig = CONFIG,
) -> Tensor:
    """As `prefill_attention`, of what `is_served`; strides of q are multiples of 16."""
    (tokens, q_heads, head_size), (pages, page_size, kv_heads, _), rows = q.shape, k_cache.shape, slots.shape[0]
    group = q_heads // kv_heads
    out = q.new_empty(tokens, q_heads, head_size) if out is None else out
    if tokens == 0 or rows == 0:
        return out.zero_()
    groups, block, stages = tuned
    tile_tokens = groups * GROUP_ROWS.value // group
    tiles = min(tokens // tile_tokens + rows, cdiv(max_query, tile_tokens) * rows)
    shape, strides = [pages * page_size, kv_heads * head_size], [kv_heads * head_size, 1]
    box = [min(page_size, block), BOX_COLUMNS.value]
    k, v = (TensorDescriptor(cache, shape, strides, box, BOX_LAYOUT) for cache in (k_cache, v_cache))
    _prefill_attention_hopper_kernel[(min(tiles * kv_heads, multiprocessors(q.device)),)](
        q, k, v, page_table, slots, query_starts, lengths, out,
        scale * math.log2(math.e), *q.stride()[:2], page_table.shape[1], pages, rows, window or 0,
        kv_heads, group, head_size, page_size, window is not None, tile_tokens, max(LEAST_ROWS_BLOCK, next_power_of_2(rows)),
        groups, block, stages, num_warps=4, maxnreg=168 if groups == 2 else 128, **pdl_options(q.device),
    )  # fmt: skip
    return out


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _row_tiles(query_starts_ptr, rows, TOKENS: gl.constexpr, ROWS_BLOCK: gl.constexpr):
    """Number of tiles of every row. Each warp holds them all, so that none waits for another."""
    layout: gl.constexpr = gl.BlockedLayout([ROWS_BLOCK // 32], [32], [gl.num_warps()], [0])
    index = gl.arange(0, ROWS_BLOCK, layout)
    starts = gl.load(query_starts_ptr + index, mask=index < rows, other=0)
    return (gl.load(query_starts_ptr + index + 1, mask=index < rows, other=0) - starts + TOKENS - 1) // TOKENS


@gluon.jit
def _find(turn, tiles, query_starts_ptr, lengths_ptr, rows, K: gl.constexpr, TOKENS: gl.constexpr, ROWS_BLOCK: gl.constexpr):
    """What this program does at its `turn`: KV head, tile of its row, the row's first query, number of queries, length, and the row.

    Tiles are dealt out from the last, forth and back, so that the programs get about as many long ones.
    """
    programs = gl.num_programs(0)
    place = gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    work = gl.minimum(turn * programs + place, tiles * K - 1)
    tile = gl.maximum(tiles - 1 - work // K, 0)  # where no row has queries there is none, and nothing is seen of the last row
    last_tile = gl.associative_scan(_row_tiles(query_starts_ptr, rows, TOKENS, ROWS_BLOCK), 0, _add)
    row = gl.minimum(gl.sum((last_tile <= tile).to(gl.int32), axis=0), rows - 1)
    tile -= gl.max(gl.where(last_tile <= tile, last_tile, 0), axis=0)
    first_query = gl.load(query_starts_ptr + row)
    return work % K, tile, first_query, gl.load(query_starts_ptr + row + 1) - first_query, gl.load(lengths_ptr + row), row


@gluon.jit
def _blocks(
    tile, num_queries, length, window,
    FIRST: gl.constexpr, LAST: gl.constexpr, TOKENS: gl.constexpr, WINDOW: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Blocks of positions: the first that a tile sees, the first that tokens `FIRST .. LAST` of it must not see in full, and the end of
    those that they see.

    One block at least: of a row without keys, all of it is masked.
    """
    first_position = length - num_queries + tile * TOKENS
    end = gl.minimum(first_position + LAST, length)
    begin = 0
    open_end = gl.maximum(first_position + FIRST + 1, 0) // BLOCK
    if WINDOW:
        begin = gl.maximum(first_position - window + 1, 0) // BLOCK
        open_end = begin
    return begin, open_end, gl.maximum((end + BLOCK - 1) // BLOCK, begin + 1)


@gluon.jit
def _places(packed, tile, first_query, num_queries, kv_head, G: gl.constexpr, TOKENS: gl.constexpr):
    """Token of the batch, query head, and whether there is one, of packed rows of a tile."""
    token = tile * TOKENS + packed // G
    return (first_query + token).to(gl.int64), kv_head * G + packed % G, (token < num_queries) & (packed < TOKENS * G)


@gluon.jit
def _ask_queries(
    buffer, q_ptr, q_token_stride, q_head_stride, tile, first_query, num_queries, kv_head,
    G: gl.constexpr, H: gl.constexpr, TOKENS: gl.constexpr, FIRST: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    packed = FIRST + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, LAYOUT))
    dimension = gl.arange(0, H, gl.SliceLayout(0, LAYOUT))
    token, head, inside = _places(packed, tile, first_query, num_queries, kv_head, G, TOKENS)
    place = token * q_token_stride + head * q_head_stride
    mask = inside[:, None] & (dimension >= 0)[None, :]
    async_copy.async_copy_global_to_shared(buffer, q_ptr + (place[:, None] + dimension[None, :]), mask=mask)
    async_copy.commit_group()


@gluon.jit
def _mask(scores, block, query_position, window, BLOCK: gl.constexpr, WINDOW: gl.constexpr, LAYOUT: gl.constexpr):
    position = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    seen = position[None, :] <= query_position[:, None]
    if WINDOW:
        seen = seen & (position[None, :] > query_position[:, None] - window)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _softmax(scores, best, total, scale_log2):
    """Weights of a block, and the online softmax after it: best, total, and what sums of before are to be multiplied with."""
    new_best = gl.maximum(best, gl.max(scores, axis=1))  # finite, so that nothing seen yet is not -inf minus -inf
    weights = gl.exp2(scores * scale_log2 - (new_best * scale_log2)[:, None])
    shrink = gl.exp2((best - new_best) * scale_log2)  # not of two products: fused, equal ones would differ by a rounding
    return weights, new_best, total * shrink + gl.sum(weights, axis=1), shrink


@gluon.jit
def _pack(weights, dtype: gl.constexpr):
    """Two columns a register. As 16 bits each, a loop would carry them one by one and put them together in every round."""
    CONVERT: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    low, high = gl.split(gl.reshape(weights, [weights.shape[0], weights.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(CONVERT, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack(packed, DTYPE: gl.constexpr, WEIGHTS: gl.constexpr):
    low, high = packed.to(gl.int16).to(DTYPE, bitcast=True), (packed >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), [packed.shape[0], 2 * packed.shape[1]]), WEIGHTS)


@gluon.jit
def _attend(
    weights, weighted, best, total, count, first, last, q, k, v, k_full, k_empty, v_full, v_empty, query_position, window,
    scale_log2, MASKED: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
    DTYPE: gl.constexpr, SCORES: gl.constexpr, WEIGHTED: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Blocks `first .. last`: the scores of each, and the values of the one before it. `count` blocks came before, of this program."""
    for block in range(first, last):
        stage, before = count % STAGES, (count - 1) % STAGES
        mbarrier.wait(k_full.index(stage), count // STAGES & 1)
        nothing = gl.zeros([GROUP_ROWS, BLOCK], gl.float32, SCORES)
        scores_later = warpgroup_mma(q, k.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), (count - 1) // STAGES & 1)
        multiplied = _unpack(weights, DTYPE, WEIGHTS)
        weighted_later = warpgroup_mma(multiplied, v.index(before), weighted, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores_later])
        mbarrier.arrive(k_empty.index(stage), count=1)
        if MASKED:
            scores = _mask(scores, block, query_position, window, BLOCK, WINDOW, SCORES)
        new_weights, best, total, shrink = _softmax(scores, best, total, scale_log2)
        weighted, _held = warpgroup_mma_wait(0, deps=[weighted_later, multiplied])
        mbarrier.arrive(v_empty.index(before), count=1)
        weighted = weighted * gl.convert_layout(shrink, gl.SliceLayout(1, WEIGHTED))[:, None]
        weights = _pack(new_weights, DTYPE)
        count += 1
    return weights, weighted, best, total, count


@gluon.jit
def _multiply(
    given, GROUP: gl.constexpr, K: gl.constexpr, G: gl.constexpr, H: gl.constexpr, WINDOW: gl.constexpr, TOKENS: gl.constexpr,
    ROWS_BLOCK: gl.constexpr, GROUPS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What a warp group does: GROUP_ROWS packed rows of each of this program's tiles."""
    tiles, turns, q_ptr, query_starts_ptr, lengths_ptr, out_ptr, q_token_stride, q_head_stride, rows, window, scale_log2 = given[:11]
    q, k, v, v_boxes, k_full, k_empty, v_full, v_empty = given[11:]
    FIRST: gl.constexpr = GROUP * GROUP_ROWS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    WEIGHTED: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, H, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=WEIGHTED, k_width=2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // H, H // 8], [4, 1], [1, 0])  # 16 bytes a thread, rows of memory
    BOX: gl.constexpr = v_boxes.shape[1]
    HALVES: gl.constexpr = H // v_boxes.shape[2]
    BOX_LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_ptr.dtype.element_ty

    kv_head, tile, first_query, num_queries, length, _row = _find(0, tiles, query_starts_ptr, lengths_ptr, rows, K, TOKENS, ROWS_BLOCK)
    _ask_queries(
        q.index(GROUP), q_ptr, q_token_stride, q_head_stride, tile, first_query, num_queries, kv_head, G, H, TOKENS, FIRST, LINES,
    )  # fmt: skip
    count = 0
    for turn in range(turns):
        begin, open_end, end = _blocks(
            tile, num_queries, length, window, FIRST // G, min((FIRST + GROUP_ROWS - 1) // G + 1, TOKENS), TOKENS, WINDOW, BLOCK
        )
        _, _, end_of_all = _blocks(tile, num_queries, length, window, 0, TOKENS, TOKENS, WINDOW, BLOCK)
        queries = q.index(turn % 2 * GROUPS + GROUP)
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        stage = count % STAGES
        mbarrier.wait(k_full.index(stage), count // STAGES & 1)
        nothing = gl.zeros([GROUP_ROWS, BLOCK], gl.float32, SCORES)
        scores_later = warpgroup_mma(queries, k.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True)

        next_kv_head, next_tile, next_first_query, next_num_queries, next_length, _row = _find(
            turn + 1, tiles, query_starts_ptr, lengths_ptr, rows, K, TOKENS, ROWS_BLOCK
        )
        _ask_queries(
            q.index((turn + 1) % 2 * GROUPS + GROUP), q_ptr, q_token_stride, q_head_stride,
            next_tile, next_first_query, next_num_queries, next_kv_head, G, H, TOKENS, FIRST, LINES,
        )  # fmt: skip

        scores = warpgroup_mma_wait(0, deps=[scores_later])
        mbarrier.arrive(k_empty.index(stage), count=1)
        packed = FIRST + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, SCORES))
        query_position = length - num_queries + tile * TOKENS + packed // G
        scores = _mask(scores, begin, query_position, window, BLOCK, WINDOW, SCORES)
        best = gl.full([GROUP_ROWS], -1e30, gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([GROUP_ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        weights, best, total, _shrink = _softmax(scores, best, total, scale_log2)
        weights = _pack(weights, dtype)
        weighted = gl.zeros([GROUP_ROWS, H], gl.float32, WEIGHTED)
        count += 1
        open_end = gl.minimum(gl.maximum(open_end, begin + 1), end)
        if not WINDOW:
            weights, weighted, best, total, count = _attend(
                weights, weighted, best, total, count, begin + 1, open_end, queries, k, v, k_full, k_empty, v_full, v_empty,
                query_position, window, scale_log2, False, BLOCK, STAGES, WINDOW, dtype, SCORES, WEIGHTED, WEIGHTS,
            )  # fmt: skip
        weights, weighted, best, total, count = _attend(
            weights, weighted, best, total, count, open_end, end, queries, k, v, k_full, k_empty, v_full, v_empty,
            query_position, window, scale_log2, True, BLOCK, STAGES, WINDOW, dtype, SCORES, WEIGHTED, WEIGHTS,
        )  # fmt: skip

        before = (count - 1) % STAGES
        mbarrier.wait(v_full.index(before), (count - 1) // STAGES & 1)
        rest = length % BOX
        if (end * BLOCK > length) & (rest > 0):
            # Behind the row's end its last page holds anything, and zero times that may be NaN. All groups write the same zeros.
            for half in gl.static_range(HALVES):
                page = v_boxes.index((before * HALVES + half) * (BLOCK // BOX) + length % BLOCK // BOX)
                line = gl.arange(0, BOX, gl.SliceLayout(1, BOX_LINES))
                page.store(gl.where((line < rest)[:, None], page.load(BOX_LINES), 0.0))
            fence_async_shared()
            gl.thread_barrier()
        multiplied = _unpack(weights, dtype, WEIGHTS)
        weighted_later = warpgroup_mma(multiplied, v.index(before), weighted, is_async=True)
        weighted, _held = warpgroup_mma_wait(0, deps=[weighted_later, multiplied])
        mbarrier.arrive(v_empty.index(before), count=1)
        for _block in range(end, end_of_all):  # that later groups of the tile see
            stage, phase = count % STAGES, count // STAGES & 1
            mbarrier.wait(k_full.index(stage), phase)
            mbarrier.arrive(k_empty.index(stage), count=1)
            mbarrier.wait(v_full.index(stage), phase)
            mbarrier.arrive(v_empty.index(stage), count=1)
            count += 1

        total = gl.convert_layout(total, gl.SliceLayout(1, WEIGHTED))
        weighted = weighted * (1.0 / gl.where(total > 0, total, 1.0))[:, None]
        queries.store(weighted.to(dtype))  # the queries are done with: from here in whole lines to memory
        packed = FIRST + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, LINES))
        dimension = gl.arange(0, H, gl.SliceLayout(0, LINES))
        token, head, inside = _places(packed, tile, first_query, num_queries, kv_head, G, TOKENS)
        place = (token * (K * G) + head)[:, None] * H + dimension[None, :]
        gl.store(out_ptr + place, queries.load(LINES), mask=inside[:, None] & (dimension >= 0)[None, :])
        kv_head, tile, first_query, num_queries, length = next_kv_head, next_tile, next_first_query, next_num_queries, next_length


@gluon.jit
def _ask_block(
    source, boxes, full, empty, lines, kv_head, stage, phase,
    H: gl.constexpr, BLOCK: gl.constexpr, BOXES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Asks for a block of keys or values, once nobody needs what is in the buffers of its stage; a line of the cache for each box."""
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(full.index(stage), 2 * BLOCK * H)  # bytes
    for half in gl.static_range(HALVES):
        for box in gl.static_range(BOXES):
            buffer = boxes.index((stage * HALVES + half) * BOXES + box)
            tma.async_copy_global_to_shared(source, [lines[box], kv_head * H + half * BOX_COLUMNS], full.index(stage), buffer)


@gluon.jit
def _fetch(
    given, K: gl.constexpr, H: gl.constexpr, N: gl.constexpr, WINDOW: gl.constexpr, TOKENS: gl.constexpr,
    ROWS_BLOCK: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the fetching warp does: keys and values of this program's tiles. Pages that a row has not are asked for behind the cache's
    end, which gives zeros."""
    tiles, turns, k_source, v_source, page_table_ptr, slots_ptr, query_starts_ptr, lengths_ptr, max_pages, pages, rows, window = given[:12]
    k_boxes, v_boxes, k_full, k_empty, v_full, v_empty = given[12:]
    BOX: gl.constexpr = k_boxes.shape[1]
    BOXES: gl.constexpr = BLOCK // BOX
    HALVES: gl.constexpr = H // k_boxes.shape[2]
    count = 0
    for turn in range(turns):
        kv_head, tile, _, num_queries, length, row = _find(turn, tiles, query_starts_ptr, lengths_ptr, rows, K, TOKENS, ROWS_BLOCK)
        begin, _, end = _blocks(tile, num_queries, length, window, 0, TOKENS, TOKENS, WINDOW, BLOCK)
        pages_ptr = page_table_ptr + gl.load(slots_ptr + row).to(gl.int64) * max_pages
        for block in range(begin, end):
            lines = ()
            for box in gl.static_range(BOXES):
                position = block * BLOCK + box * BOX
                page = gl.load(pages_ptr + position // N, mask=position < length, other=pages)
                lines += (page * N + position % N,)  # type: ignore[assignment]  # unrolled: a longer tuple each time
            stage, phase = count % STAGES, count // STAGES & 1 ^ 1
            _ask_block(k_source, k_boxes, k_full, k_empty, lines, kv_head, stage, phase, H, BLOCK, BOXES, HALVES)
            _ask_block(v_source, v_boxes, v_full, v_empty, lines, kv_head, stage, phase, H, BLOCK, BOXES, HALVES)
            count += 1


@gluon.jit(do_not_specialize=["max_pages", "pages", "rows", "window"])
def _prefill_attention_hopper_kernel(
    q_ptr, k_source, v_source, page_table_ptr, slots_ptr, query_starts_ptr, lengths_ptr, out_ptr,
    scale_log2, q_token_stride, q_head_stride, max_pages, pages, rows, window,
    K: gl.constexpr, G: gl.constexpr, H: gl.constexpr, N: gl.constexpr, WINDOW: gl.constexpr, TOKENS: gl.constexpr,
    ROWS_BLOCK: gl.constexpr, GROUPS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    BOX: gl.constexpr = k_source.block_type.shape[0]
    BUFFERS: gl.constexpr = STAGES * (BLOCK // BOX) * (H // BOX_COLUMNS)
    LAYOUT: gl.constexpr = k_source.layout
    k_boxes = gl.allocate_shared_memory(dtype, [BUFFERS, BOX, BOX_COLUMNS], LAYOUT)
    v_boxes = gl.allocate_shared_memory(dtype, [BUFFERS, BOX, BOX_COLUMNS], LAYOUT)
    k = k_boxes._reinterpret(dtype, [STAGES, BLOCK, H], LAYOUT)
    v = v_boxes._reinterpret(dtype, [STAGES, BLOCK, H], LAYOUT)
    q = gl.allocate_shared_memory(dtype, [2 * GROUPS, GROUP_ROWS, H], LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=GROUPS)

    tiles = gl.sum(_row_tiles(query_starts_ptr, rows, TOKENS, ROWS_BLOCK), axis=0)
    program, programs = gl.program_id(0), gl.num_programs(0)
    turns = tiles * K // programs
    place = gl.where(turns % 2 == 0, program, programs - 1 - program)
    turns += gl.where(place < tiles * K - turns * programs, 1, 0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    multiply = (
        tiles, turns, q_ptr, query_starts_ptr, lengths_ptr, out_ptr, q_token_stride, q_head_stride, rows, window, scale_log2,
        q, k, v, v_boxes, k_full, k_empty, v_full, v_empty,
    )  # fmt: skip
    fetch = (
        tiles, turns, k_source, v_source, page_table_ptr, slots_ptr, query_starts_ptr, lengths_ptr, max_pages, pages, rows, window,
        k_boxes, v_boxes, k_full, k_empty, v_full, v_empty,
    )  # fmt: skip
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (multiply, 0, K, G, H, WINDOW, TOKENS, ROWS_BLOCK, GROUPS, BLOCK, STAGES)),
                (_multiply, (multiply, 1, K, G, H, WINDOW, TOKENS, ROWS_BLOCK, GROUPS, BLOCK, STAGES)),
                (_fetch, (fetch, K, H, N, WINDOW, TOKENS, ROWS_BLOCK, BLOCK, STAGES)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (multiply, 0, K, G, H, WINDOW, TOKENS, ROWS_BLOCK, GROUPS, BLOCK, STAGES)),
                (_multiply, (multiply, 1, K, G, H, WINDOW, TOKENS, ROWS_BLOCK, GROUPS, BLOCK, STAGES)),
                (_multiply, (multiply, 2, K, G, H, WINDOW, TOKENS, ROWS_BLOCK, GROUPS, BLOCK, STAGES)),
                (_fetch, (fetch, K, H, N, WINDOW, TOKENS, ROWS_BLOCK, BLOCK, STAGES)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
