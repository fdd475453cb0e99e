"""From the rows of a plan and the slots' state to the tokens of a step.

D decode rows, P prefill rows, T_p prefill tokens, T = D + T_p tokens, S slots, N tokens a page.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, next_power_of_2, pdl_options

TOKENS = 128  # of a program
ROWS = 64  # prefill rows that a program compares at a time


def plan_unpack(
    page_table: Tensor,
    length: Tensor,
    last_token: Tensor,
    done: Tensor,
    decode_slots: Tensor,
    prefill_slots: Tensor,
    prefill_starts: Tensor,
    prefill_lengths: Tensor,
    prefill_ids: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """page_table `[S, pages]` int32, length and last_token `[S]` int32, done `[S]` bool; the plan's sections, int32.

    Returns ids and positions `[T]` int32, locations `[T]` int64 (page * N + offset), KV lengths `[D + P]` int32 with this
    step's tokens, and query_starts `[P + 1]` int32. The row of a done slot has KV length 0 and writes to location 0, in the
    scratch page; one of prefill has all its tokens at position 0, however many they are.
    On a GPU one launch, which reads nothing but device memory: with the sections at fixed addresses, a graph can hold it.
    """
    implementation = plan_unpack_triton if page_table.is_cuda else plan_unpack_torch
    return implementation(
        page_table, length, last_token, done, decode_slots, prefill_slots, prefill_starts, prefill_lengths, prefill_ids, page_size
    )


def plan_unpack_torch(
    page_table: Tensor,
    length: Tensor,
    last_token: Tensor,
    done: Tensor,
    decode_slots: Tensor,
    prefill_slots: Tensor,
    prefill_starts: Tensor,
    prefill_lengths: Tensor,
    prefill_ids: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    slots = decode_slots.long()
    active = ~done[slots]
    decode_positions = length[slots]
    decode_locations = _locate(page_table, slots, decode_positions, page_size).where(active, 0)

    query_starts = torch.zeros(len(prefill_slots) + 1, dtype=torch.int32, device=prefill_slots.device)
    query_starts[1:] = prefill_lengths.cumsum(0)
    row = torch.repeat_interleave(prefill_lengths, output_size=len(prefill_ids))
    offset = torch.arange(len(prefill_ids), dtype=torch.int32, device=row.device) - query_starts[row]
    prefilled = ~done[prefill_slots.long()]
    prefill_positions = (prefill_starts[row] + offset).where(prefilled[row], 0)
    prefill_locations = _locate(page_table, prefill_slots.long()[row], prefill_positions, page_size).where(prefilled[row], 0)

    return (
        torch.cat((last_token[slots], prefill_ids)),
        torch.cat((decode_positions, prefill_positions)),
        torch.cat((decode_locations, prefill_locations)),
        torch.cat(((decode_positions + 1).where(active, 0), (prefill_starts + prefill_lengths).where(prefilled, 0))),
        query_starts,
    )


def _locate(page_table: Tensor, slots: Tensor, positions: Tensor, page_size: int) -> Tensor:
    page = page_table[slots, (positions // page_size).long()].long()  # int64 before the product: a pool may hold 2**31 tokens
    return page * page_size + positions % page_size


def plan_unpack_triton(
    page_table: Tensor,
    length: Tensor,
    last_token: Tensor,
    done: Tensor,
    decode_slots: Tensor,
    prefill_slots: Tensor,
    prefill_starts: Tensor,
    prefill_lengths: Tensor,
    prefill_ids: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    decode_rows, prefill_rows, prefill_tokens = len(decode_slots), len(prefill_slots), len(prefill_ids)
    tokens, rows = decode_rows + prefill_tokens, decode_rows + prefill_rows

    def empty(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=page_table.device)

    ids, positions, locations, lengths = empty(tokens), empty(tokens), empty(tokens, torch.int64), empty(rows)
    query_starts = empty(prefill_rows + 1)
    # Blocks of decode rows, blocks of prefill rows (one at least, for query_starts), blocks of prefill tokens.
    decode_blocks, row_blocks = cdiv(decode_rows, TOKENS), max(cdiv(prefill_rows, TOKENS), 1)
    _plan_unpack_kernel[(decode_blocks + row_blocks + cdiv(prefill_tokens, TOKENS),)](
        page_table, length, last_token, done, decode_slots, prefill_slots, prefill_starts, prefill_lengths, prefill_ids,
        ids, positions, locations, lengths, query_starts, page_table.shape[1], decode_rows, prefill_rows, prefill_tokens,
        decode_blocks, row_blocks, page_size, TOKENS, max(min(next_power_of_2(prefill_rows), ROWS), 16),
        num_warps=4, **pdl_options(page_table.device),
    )  # fmt: skip
    return ids, positions, locations, lengths, query_starts


@triton.jit
def _plan_unpack_kernel(
    page_table_ptr, length_ptr, last_token_ptr, done_ptr,
    decode_slots_ptr, prefill_slots_ptr, prefill_starts_ptr, prefill_lengths_ptr, prefill_ids_ptr,
    ids_ptr, positions_ptr, locations_ptr, lengths_ptr, query_starts_ptr, max_pages, decode_rows, prefill_rows, prefill_tokens,
    decode_blocks, row_blocks, N: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if block < decode_blocks:
        row = block * TOKENS + tl.arange(0, TOKENS)
        inside = row < decode_rows
        slot = tl.load(decode_slots_ptr + row, mask=inside, other=0)
        active = inside & (tl.load(done_ptr + slot, mask=inside, other=1) == 0)
        position = tl.load(length_ptr + slot, mask=inside, other=0)
        tl.store(ids_ptr + row, tl.load(last_token_ptr + slot, mask=inside, other=0), mask=inside)
        tl.store(positions_ptr + row, position, mask=inside)
        tl.store(locations_ptr + row, _locate_block(page_table_ptr, slot, position, active, max_pages, N), mask=inside)
        tl.store(lengths_ptr + row, tl.where(active, position + 1, 0), mask=inside)
    elif block < decode_blocks + row_blocks:
        row = (block - decode_blocks) * TOKENS + tl.arange(0, TOKENS)
        start = _row_starts(row, prefill_lengths_ptr, prefill_rows, ROWS)
        tl.store(query_starts_ptr + row, start, mask=row < prefill_rows)
        tl.store(query_starts_ptr + prefill_rows, prefill_tokens)
        inside = row < prefill_rows
        end = tl.load(prefill_starts_ptr + row, mask=inside, other=0) + tl.load(prefill_lengths_ptr + row, mask=inside, other=0)
        active = tl.load(done_ptr + tl.load(prefill_slots_ptr + row, mask=inside, other=0), mask=inside, other=1) == 0
        tl.store(lengths_ptr + decode_rows + row, tl.where(active, end, 0), mask=inside)
    else:
        token = (block - decode_blocks - row_blocks) * TOKENS + tl.arange(0, TOKENS)
        inside = token < prefill_tokens
        row, offset = _row_of(token, prefill_lengths_ptr, prefill_rows, ROWS)
        slot = tl.load(prefill_slots_ptr + row, mask=inside, other=0)
        active = inside & (tl.load(done_ptr + slot, mask=inside, other=1) == 0)
        position = tl.where(active, tl.load(prefill_starts_ptr + row, mask=inside, other=0) + offset, 0)
        place = decode_rows + token
        tl.store(ids_ptr + place, tl.load(prefill_ids_ptr + token, mask=inside, other=0), mask=inside)
        tl.store(positions_ptr + place, position, mask=inside)
        tl.store(locations_ptr + place, _locate_block(page_table_ptr, slot, position, active, max_pages, N), mask=inside)


@triton.jit
def _locate_block(page_table_ptr, slot, position, inside, max_pages, N: tl.constexpr):
    """int64 from the page on: a pool may hold 2**31 tokens. Elsewhere than inside, 0."""
    page = tl.load(page_table_ptr + slot.to(tl.int64) * max_pages + position // N, mask=inside, other=0).to(tl.int64)
    return page * N + tl.where(inside, position % N, 0)


@triton.jit
def _row_starts(row, lengths_ptr, rows, ROWS: tl.constexpr):
    """The tokens of all rows before each of `row`."""
    starts = tl.zeros_like(row)
    for first in range(0, rows, ROWS):
        other = first + tl.arange(0, ROWS)
        lengths = tl.load(lengths_ptr + other, mask=other < rows, other=0)
        starts += tl.sum(tl.where(other[None, :] < row[:, None], lengths[None, :], 0), axis=1)
    return starts


@triton.jit
def _row_of(token, lengths_ptr, rows, ROWS: tl.constexpr):
    """The row that holds each token, and the token's place within the row. Empty rows hold none."""
    row = tl.zeros_like(token)
    start = tl.zeros_like(token)
    before = tl.full([], 0, tl.int32)
    for first in range(0, rows, ROWS):
        other = first + tl.arange(0, ROWS)
        lengths = tl.load(lengths_ptr + other, mask=other < rows, other=0)
        ends = before + tl.cumsum(lengths, axis=0)
        past = (ends[None, :] <= token[:, None]) & (other < rows)[None, :]
        row += tl.sum(past.to(tl.int32), axis=1)
        start += tl.sum(tl.where(past, lengths[None, :], 0), axis=1)
        before += tl.sum(lengths, axis=0)
    return row, token - start
