"""What log-probabilities are made of: each row's log-sum-exp, the logit of one id, and the largest logits.

B rows, L columns of logits: the vocabulary ids from `first` on. With the vocabulary spread over ranks, each computes its part:
parts go together by log-sum-exp, by maximum, and by sorting.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, next_power_of_2, pdl_options
from kernels.offers import keys_of
from kernels.search import ROOM, WARPS, find_cut, gather, kth_largest_bound, logit_of, order_key, write_hits

NO_ID = -1  # of a largest logit, where there are fewer columns than were asked for
TILE = 1024  # columns of a program of the first pass
RUN = 128  # columns of which it keeps the maximum
NOTHING = tl.constexpr(-(2**63))  # below every pair of key and column
LOW_BITS = tl.constexpr(2**32 - 1)


def logprobs(logits: Tensor, chosen: Tensor, k: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits `[B, L]`, float32, float16 or bfloat16; chosen `[B]` int32.

    Returns, float32 but for the ids: log-sum-exp `[B]`; the chosen id's logit `[B]`, -inf for an id that is not among the columns; ids
    `[B, k]` int32 and logits `[B, k]` of the largest, by (logit descending, id ascending), NO_ID and -inf past the last column.
    A log-probability is a logit less the log-sum-exp. Rows with a NaN give no meaningful values.
    On a GPU two launches; a row's result depends on that row only. Raises ValueError if the logits of a row are not contiguous.
    """
    if logits.stride(1) != 1:
        raise ValueError(f"the logits of a row must be contiguous, got strides {logits.stride()}")
    return logprobs_triton(logits, chosen, k, first) if logits.is_cuda else logprobs_torch(logits, chosen, k, first)


def logprobs_torch(logits: Tensor, chosen: Tensor, k: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = logits.float()
    rows, columns = logits.shape
    place = chosen.long() - first
    inside = (place >= 0) & (place < columns)
    chosen_logits = logits.gather(1, place.where(inside, 0)[:, None])[:, 0].where(inside, -torch.inf)

    top = keys_of(logits, torch.arange(columns, device=logits.device)).topk(min(k, columns)).indices
    top_ids = logits.new_full((rows, k), NO_ID, dtype=torch.int32)
    top_logits = logits.new_full((rows, k), -torch.inf)
    top_ids[:, : top.shape[1]] = top + first
    top_logits[:, : top.shape[1]] = logits.gather(1, top)
    return logits.logsumexp(dim=1), chosen_logits, top_ids, top_logits


def logprobs_triton(logits: Tensor, chosen: Tensor, k: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (rows, columns), device = logits.shape, logits.device

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    total, chosen_logits, top_logits, top_ids = empty(rows), empty(rows), empty(rows, k), empty(rows, k, dtype=torch.int32)
    if rows:
        tiles = cdiv(columns, TILE)
        runs = tiles * (TILE // RUN)
        masses, maxima, hits = empty(rows, tiles), empty(rows, runs), empty(rows, runs, dtype=torch.int32)
        gathered, gathered_ids = empty(rows, ROOM if k else 0), empty(rows, ROOM if k else 0, dtype=torch.int32)
        _logprobs_scan_kernel[(tiles, rows)](
            logits, masses, maxima, columns, logits.stride(0), tiles, TILE, RUN, num_warps=4, **pdl_options(device)
        )
        _logprobs_top_kernel[(rows,)](
            logits, chosen, masses, maxima, hits, gathered_ids, gathered, total, chosen_logits, top_ids, top_logits,
            first, columns, logits.stride(0), tiles, runs, k, next_power_of_2(max(k, 1)),
            next_power_of_2(tiles), TILE // RUN, RUN, next_power_of_2(runs), ROOM, NO_ID,
            num_warps=WARPS, **pdl_options(device),
        )  # fmt: skip
    return total, chosen_logits, top_ids, top_logits


@triton.jit
def _logprobs_scan_kernel(
    logits_ptr, masses_ptr, maxima_ptr, columns, row_stride, tiles, TILE: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Of a tile: its softmax denominator, relative to its largest logit, and the largest logit of each run."""
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    column = tile * TILE + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + row * row_stride + column, mask=column < columns, other=float("-inf")).to(tl.float32)
    largest = tl.max(logits, axis=0)
    masses = tl.where(logits > float("-inf"), tl.exp(logits - largest), 0.0)
    RUNS: tl.constexpr = TILE // RUN
    place = row * tiles + tile
    tl.store(masses_ptr + place, tl.sum(masses, axis=0))
    tl.store(maxima_ptr + place * RUNS + tl.arange(0, RUNS), tl.max(tl.reshape(logits, [RUNS, RUN]), axis=1))


@triton.jit
def _logprobs_top_kernel(
    logits_ptr, chosen_ptr, masses_ptr, maxima_ptr, hits_ptr, gathered_ids_ptr, gathered_ptr,
    total_ptr, chosen_logits_ptr, top_ids_ptr, top_logits_ptr, first, columns, row_stride, tiles, runs,
    K: tl.constexpr, K_BLOCK: tl.constexpr, TILES_BLOCK: tl.constexpr, TILE_RUNS: tl.constexpr, RUN: tl.constexpr,
    RUNS_BLOCK: tl.constexpr, ROOM: tl.constexpr, NO_ID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row_ptr = logits_ptr + row * row_stride
    tile, run = tl.arange(0, TILES_BLOCK), tl.arange(0, RUNS_BLOCK)
    maxima = tl.load(maxima_ptr + row * runs + run, mask=run < runs, other=float("-inf"))
    largest = tl.max(maxima, axis=0)
    of_tile = tile[:, None] * TILE_RUNS + tl.arange(0, TILE_RUNS)[None, :]
    tile_largest = tl.max(tl.load(maxima_ptr + row * runs + of_tile, mask=tile[:, None] < tiles, other=float("-inf")), axis=1)
    masses = tl.load(masses_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
    mass = tl.sum(masses * tl.exp(tl.where(masses > 0, tile_largest - largest, 0.0)), axis=0)
    tl.store(total_ptr + row, tl.where(mass > 0, largest + tl.log(tl.where(mass > 0, mass, 1.0)), float("-inf")))

    column = tl.load(chosen_ptr + row) - first
    inside = (column >= 0) & (column < columns)
    tl.store(chosen_logits_ptr + row, tl.load(row_ptr + column, mask=inside, other=float("-inf")).to(tl.float32))
    if K > 0:
        low, wanted = tl.full([], float("-inf"), tl.float32), tl.full([], K, tl.int32)
        if runs >= K:
            low = kth_largest_bound(order_key(maxima), wanted)
        fails, holds = order_key(low).to(tl.int64) - 1, order_key(largest).to(tl.int64)
        hits_ptr += row * runs
        ids_ptr, list_ptr, none = gathered_ids_ptr + row * ROOM, gathered_ptr + row * ROOM, tl.full([], 0, tl.int32)
        hits = write_hits(hits_ptr, run, (maxima >= low) & (run < runs))
        found = gather(row_ptr, hits_ptr, hits, ids_ptr, list_ptr, none, fails, holds, columns, RUN, ROOM)
        if found > ROOM:  # first those above the K-th largest, then its equals, of which the lowest columns do
            cut, _, _, _ = find_cut(
                row_ptr, row_ptr, hits_ptr, ids_ptr, list_ptr, columns, hits, found, fails, holds, largest, 1.0,
                tl.minimum(wanted, columns), tl.full([], float("inf"), tl.float32), columns, False, RUN, ROOM,
            )  # fmt: skip
            found = gather(row_ptr, hits_ptr, hits, ids_ptr, list_ptr, none, cut, holds, columns, RUN, ROOM)
            found = gather(row_ptr, hits_ptr, hits, ids_ptr, list_ptr, found, cut - 1, cut, columns, RUN, ROOM)
        index = tl.arange(0, ROOM)
        listed = index < tl.minimum(found, ROOM)
        columns_found = tl.load(ids_ptr + index, mask=listed, other=0)
        keys = order_key(tl.load(list_ptr + index, mask=listed, other=0.0)).to(tl.int64)
        ranks = tl.where(listed, (keys << 32) | (columns_found.to(tl.int64) ^ LOW_BITS), NOTHING)
        place = tl.arange(0, K_BLOCK)
        top = tl.full([K_BLOCK], NOTHING, tl.int64)
        for number in range(K):
            best = tl.max(ranks, axis=0)
            top = tl.where(place == number, best, top)
            ranks = tl.where(ranks == best, NOTHING, ranks)
        is_id = top > NOTHING
        ids = ((top & LOW_BITS) ^ LOW_BITS).to(tl.int32) + first  # the lower column has the greater pair
        tl.store(top_ids_ptr + row * K + place, tl.where(is_id, ids, NO_ID), mask=place < K)
        tl.store(top_logits_ptr + row * K + place, tl.where(is_id, logit_of(top >> 32), float("-inf")), mask=place < K)
