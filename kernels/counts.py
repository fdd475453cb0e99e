"""How often a sequence holds which ids: what penalties ask for.

A sequence holds few of all ids: so beside the counts stands which ids they are of, and what penalises goes through these alone.

S slots, L columns: the vocabulary ids from `first` on, C columns that a list has room for, N ids to count, P rows with prefill.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, pdl_options

IN_PROMPT = 1 << 30  # of a count: the id is in the prompt; the bits below say how often it was generated
IDS = 256  # of a program at a time; no fewer than its threads: what an atomic operation returns, only the thread that ran it learns
SHARES = 8  # that a sequence is cut into
CLEARED = 2048  # ids of a program at a time


class Held(NamedTuple):
    """What the sequence of each slot holds. The torch functions keep the counts alone; the kernels change a count and the list together."""

    counts: Tensor  # [S, L] int32, see IN_PROMPT
    listed: Tensor  # [S, C] int32: the columns whose counts are not 0, each once, in any order
    distinct: Tensor  # [S] int32: how many are listed

    @classmethod
    def nothing(cls, slots: int, columns: int, tokens: int, device: torch.device) -> "Held":
        """Of sequences of at most so many tokens. On a CPU, memory that nothing is counted in is not touched: a row's counts are undefined
        until it is recounted."""
        allocate = torch.zeros if device.type == "cuda" else torch.empty
        counts = allocate(slots, columns, dtype=torch.int32, device=device)
        listed = torch.empty(slots, min(columns, tokens), dtype=torch.int32, device=device)
        return cls(counts, listed, torch.zeros(slots, dtype=torch.int32, device=device))

    def check(self) -> None:
        """Raises ValueError if counts or lists are not contiguous."""
        if not (self.counts.is_contiguous() and self.listed.is_contiguous()):
            raise ValueError(f"counts and lists must be contiguous, got strides {self.counts.stride()} and {self.listed.stride()}")


def count(held: Held, counted: Tensor, slots: Tensor, ids: Tensor, first: int = 0) -> None:
    """held, in place; counted `[S]` bool; slots `[N]` int32 or int64, ids `[N]` int32: were generated.

    A pair of slot and id may come more than once. Not counted are ids of slots that are not, and those outside `[first, first + L)`,
    negative ones too. Raises ValueError if counts or lists are not contiguous.
    """
    held.check()
    implementation = count_triton if held.counts.is_cuda else count_torch
    implementation(held, counted, slots, ids, first)


def recount(
    held: Held,
    counted: Tensor,
    slots: Tensor,
    lengths: Tensor,
    yields: Tensor,
    prompt_length: Tensor,
    token_ids: Tensor,
    page_table: Tensor,
    page_size: int,
    first: int = 0,
) -> None:
    """held, in place: anew, from what their pages hold, of the slots that are counted and whose rows yield a token.

    counted `[S]` bool; slots `[P]` int32, none of those twice; lengths `[P]` int32: tokens in the pages; yields `[P]` bool; prompt_length
    `[S]` int32: positions from there on were generated. token_ids int32 by place in the cache, page_table `[S, max_pages]` int32.
    Raises ValueError if counts, lists or the page table are not contiguous.
    """
    held.check()
    if not page_table.is_contiguous():
        raise ValueError(f"the page table must be contiguous, got strides {page_table.stride()}")
    implementation = recount_triton if held.counts.is_cuda else recount_torch
    implementation(held, counted, slots, lengths, yields, prompt_length, token_ids, page_table, page_size, first)


def count_torch(held: Held, counted: Tensor, slots: Tensor, ids: Tensor, first: int = 0) -> None:
    places, inside = _places(held.counts, slots, ids, first)
    held.counts.view(-1).scatter_add_(0, places, (inside & counted[slots.long()]).int())


def recount_torch(
    held: Held,
    counted: Tensor,
    slots: Tensor,
    lengths: Tensor,
    yields: Tensor,
    prompt_length: Tensor,
    token_ids: Tensor,
    page_table: Tensor,
    page_size: int,
    first: int = 0,
) -> None:
    wanted = yields & counted[slots.long()]
    slots, lengths = slots[wanted].long(), lengths[wanted].long()
    held.counts[slots] = 0
    row = torch.repeat_interleave(lengths)
    positions = torch.arange(len(row), device=row.device) - (lengths.cumsum(0) - lengths)[row]
    owners = slots[row]
    in_cache = page_table[owners, positions // page_size].long() * page_size + positions % page_size
    places, inside = _places(held.counts, owners, token_ids[in_cache], first)
    in_prompt = positions < prompt_length[owners]
    flat = held.counts.view(-1)
    flat.scatter_reduce_(0, places, (inside & in_prompt).int() * IN_PROMPT, "amax")
    flat.scatter_add_(0, places, (inside & ~in_prompt).int())


def _places(counts: Tensor, slots: Tensor, ids: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Where each id of a slot is counted, and whether it is one of the columns."""
    columns = ids.long() - first
    inside = (columns >= 0) & (columns < counts.shape[1])
    return slots.long() * counts.shape[1] + columns.where(inside, 0), inside


def count_triton(held: Held, counted: Tensor, slots: Tensor, ids: Tensor, first: int = 0) -> None:
    number = len(ids)
    if number:
        _count_kernel[(cdiv(number, IDS),)](
            *held, counted, slots, ids, number, held.counts.shape[1], held.listed.shape[1], first, IDS,
            num_warps=8, **pdl_options(ids.device),
        )  # fmt: skip


def recount_triton(
    held: Held,
    counted: Tensor,
    slots: Tensor,
    lengths: Tensor,
    yields: Tensor,
    prompt_length: Tensor,
    token_ids: Tensor,
    page_table: Tensor,
    page_size: int,
    first: int = 0,
) -> None:
    rows, columns, room, pdl = len(slots), held.counts.shape[1], held.listed.shape[1], pdl_options(slots.device)
    if rows:
        _clear_kernel[(rows,)](*held, counted, slots, yields, columns, room, CLEARED, num_warps=8, **pdl)
        _recount_kernel[(SHARES, rows)](
            *held, counted, slots, lengths, yields, prompt_length, token_ids, page_table, page_table.shape[1], page_size, columns, room,
            first, IN_PROMPT, SHARES, IDS, num_warps=4, **pdl,
        )  # fmt: skip


@triton.jit(do_not_specialize=["number"])  # one kernel for all of them
def _count_kernel(
    counts_ptr, listed_ptr, distinct_ptr, counted_ptr, slots_ptr, ids_ptr, number, columns, room, first,
    IDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * IDS + tl.arange(0, IDS)
    inside = index < number
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.load(ids_ptr + index, mask=inside, other=-1) - first
    slot = tl.load(slots_ptr + index, mask=inside, other=0).to(tl.int64)
    inside &= (column >= 0) & (column < columns) & (tl.load(counted_ptr + slot, mask=inside, other=0) != 0)
    before = tl.atomic_add(counts_ptr + slot * columns + column, 1, mask=inside, sem="relaxed")
    _list_new(listed_ptr, distinct_ptr, slot, column, inside & (before == 0), room)


@triton.jit
def _clear_kernel(
    counts_ptr, listed_ptr, distinct_ptr, counted_ptr, slots_ptr, yields_ptr, columns, room, CLEARED: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if (tl.load(yields_ptr + row) != 0) & (tl.load(counted_ptr + slot) != 0):
        distinct = tl.load(distinct_ptr + slot)
        for start in range(0, distinct, CLEARED):
            index = start + tl.arange(0, CLEARED)
            inside = index < distinct
            column = tl.load(listed_ptr + slot * room + index, mask=inside, other=0)
            tl.store(counts_ptr + slot * columns + column, tl.zeros([CLEARED], tl.int32), mask=inside)
        tl.debug_barrier()  # every thread has read how many there were
        tl.store(distinct_ptr + slot, 0)


@triton.jit
def _recount_kernel(
    counts_ptr, listed_ptr, distinct_ptr, counted_ptr, slots_ptr, lengths_ptr, yields_ptr, prompt_length_ptr, token_ids_ptr,
    page_table_ptr, max_pages, page_size, columns, room, first,
    IN_PROMPT: tl.constexpr, SHARES: tl.constexpr, IDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    share, row = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if (tl.load(yields_ptr + row) != 0) & (tl.load(counted_ptr + slot) != 0):
        length, prompt_length = tl.load(lengths_ptr + row), tl.load(prompt_length_ptr + slot)
        for start in range(share * IDS, length, SHARES * IDS):
            position = start + tl.arange(0, IDS)
            inside = position < length
            page = tl.load(page_table_ptr + slot * max_pages + position // page_size, mask=inside, other=0).to(tl.int64)
            column = tl.load(token_ids_ptr + page * page_size + position % page_size, mask=inside, other=-1) - first
            inside &= (column >= 0) & (column < columns)
            place, in_prompt = counts_ptr + slot * columns + column, position < prompt_length
            prompted = tl.atomic_or(place, tl.full([IDS], IN_PROMPT, tl.int32), mask=inside & in_prompt, sem="relaxed")
            generated = tl.atomic_add(place, 1, mask=inside & (position >= prompt_length), sem="relaxed")
            before = tl.where(in_prompt, prompted, generated)
            _list_new(listed_ptr, distinct_ptr, slot + tl.zeros([IDS], tl.int64), column, inside & (before == 0), room)


@triton.jit
def _list_new(listed_ptr, distinct_ptr, slot, column, new, room):
    """Of all that count one id of a slot at a time, one finds 0 there: its atomic operation came first. That one lists the id."""
    index = tl.atomic_add(distinct_ptr + slot, 1, mask=new, sem="relaxed")
    tl.store(listed_ptr + slot * room + index, column, mask=new)
