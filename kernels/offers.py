"""The next token of every row where the vocabulary is in parts, ranks' or tiles' of `kernels.offering_head`: each offers the best of its
columns, the best offer is chosen.

An offer is the score of an id and the id in one number, so that what ranks exchange is 8 bytes a row and its largest is the choice.
B rows, L columns of a rank, T parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, next_power_of_2, pdl_options
from kernels.noise import GREEDY_BELOW, gumbel, noisy_block
from kernels.search import order_key

FAILED = tl.constexpr(-2)  # the id of a row whose logits hold a NaN
LOW = tl.constexpr(2**32 - 1)
NAN = tl.constexpr(2**63 - 1)  # of a row that is to fail: no other is larger
UNDECIDED = tl.constexpr(-(2**63))  # of a row that is to be chosen from its logits: every other is larger
SIGN = tl.constexpr(2**31 - 1)  # all bits of a float but its sign
ROWS = 128  # of a program
BLOCK = 4096  # offers of a program, if a row has no more: fewer rows, where each has many
OF_WARP = 1024  # offers


def offer(
    logits: Tensor, ids: Tensor, first: int, temperature: Tensor | None = None, seeds: Tensor | None = None, positions: Tensor | None = None
) -> Tensor:  # fmt: skip
    """logits `[B, L]` float32, of the ids from `first` on; ids `[B]` int32 as `greedy` (first added) or `sample` without filters chooses
    them of these columns, -2 for a row with a NaN; temperature `[B]` float32, seeds `[B]` int64, positions `[B]` int32 as for `sample`,
    or none: all rows are greedy -> offers `[B]` int64, in the order of (score ascending, id descending)."""
    if not logits.is_cuda:
        return offer_torch(logits, ids, first, temperature, seeds, positions)
    return offer_triton(logits, ids, first, temperature, seeds, positions)


def best_offer(offers: Tensor) -> Tensor:
    """offers `[B, T]` int64 -> ids `[B]` int32; -2 where a part of the row had a NaN."""
    return best_offer_triton(offers) if offers.is_cuda else best_offer_torch(offers)


def offer_torch(
    logits: Tensor, ids: Tensor, first: int, temperature: Tensor | None = None, seeds: Tensor | None = None, positions: Tensor | None = None
) -> Tensor:  # fmt: skip
    own = logits.gather(1, (ids - first).clamp_(min=0).long()[:, None])
    if temperature is not None and seeds is not None and positions is not None:
        own = scores_of(own, ids[:, None], temperature, seeds, positions)
    return keys_of(own, ids[:, None])[:, 0].masked_fill_(ids == FAILED.value, NAN.value)


def best_offer_torch(offers: Tensor) -> Tensor:
    largest = offers.amax(dim=1)
    ids = ids_of(largest)
    return ids.masked_fill_(largest == NAN.value, FAILED.value)


def scores_of(logits: Tensor, ids: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """What `sample` compares, of columns whose ids differ by row: logits and ids `[B, C]` -> `[B, C]`."""
    random = temperature >= GREEDY_BELOW.value
    noisy = logits / temperature.where(random, 1.0)[:, None] + gumbel(seeds, positions, ids)
    return torch.where(random[:, None], noisy, logits)


def keys_of(scores: Tensor, ids: Tensor) -> Tensor:
    """float32 `[B, C]` and integers of that shape or `[C]` -> int64 in the order of (score ascending, id descending): the largest is the
    one to choose."""
    bits = (scores + 0.0).view(torch.int32)  # -0 and 0 are equal
    ordered = bits.where(bits >= 0, bits ^ SIGN.value).long()
    keys: Tensor = (ordered << 32) | (LOW.value - ids.long())
    return keys


def ids_of(keys: Tensor) -> Tensor:
    ids: Tensor = (LOW.value - (keys & LOW.value)).int()
    return ids


def offer_triton(
    logits: Tensor, ids: Tensor, first: int, temperature: Tensor | None = None, seeds: Tensor | None = None, positions: Tensor | None = None
) -> Tensor:  # fmt: skip
    offers = torch.empty(len(ids), dtype=torch.int64, device=ids.device)
    if len(ids):
        _offer_kernel[(cdiv(len(ids), ROWS),)](
            logits, ids, temperature, seeds, positions, offers, first, len(ids), logits.stride(0), temperature is not None, ROWS,
            num_warps=4, **pdl_options(ids.device),
        )  # fmt: skip
    return offers


def best_offer_triton(offers: Tensor) -> Tensor:
    rows, parts = offers.shape
    ids = torch.empty(rows, dtype=torch.int32, device=offers.device)
    if rows:
        parts_block = next_power_of_2(parts)
        block = max(min(ROWS, BLOCK // parts_block), 1)
        warps = min(max(block * parts_block // OF_WARP, 4), 16)
        _best_offer_kernel[(cdiv(rows, block),)](
            offers, ids, rows, parts, *offers.stride(), parts_block, block, num_warps=warps, **pdl_options(offers.device)
        )  # fmt: skip
    return ids


@triton.jit(do_not_specialize=["rows", "first"])
def _offer_kernel(
    logits_ptr, ids_ptr, temperature_ptr, seeds_ptr, positions_ptr, offers_ptr, first, rows, row_stride,
    RANDOM: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    id_ = tl.load(ids_ptr + row, mask=inside, other=0)
    failed = id_ == FAILED
    scores = tl.load(logits_ptr + row.to(tl.int64) * row_stride + tl.where(failed, 0, id_ - first), mask=inside, other=0.0)
    if RANDOM:
        temperature = tl.load(temperature_ptr + row, mask=inside, other=1.0)
        random = temperature >= GREEDY_BELOW
        seeds, positions = tl.load(seeds_ptr + row, mask=inside, other=0), tl.load(positions_ptr + row, mask=inside, other=0)
        noisy = noisy_block(scores, tl.where(random, temperature, 1.0), seeds, positions, id_)
        scores = tl.where(random, noisy, scores)
    tl.store(offers_ptr + row, tl.where(failed, NAN, key_of(scores, id_)), mask=inside)


@triton.jit(do_not_specialize=["rows", "row_stride", "part_stride"])
def _best_offer_kernel(
    offers_ptr, ids_ptr, rows, parts, row_stride, part_stride, PARTS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, part = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PARTS)
    inside = (row < rows)[:, None] & (part < parts)[None, :]
    place = row.to(tl.int64)[:, None] * row_stride + part[None, :] * part_stride
    offers = tl.load(offers_ptr + place, mask=inside, other=UNDECIDED)
    largest = tl.max(offers, axis=1)
    tl.store(ids_ptr + row, id_of(largest), mask=row < rows)


@triton.jit
def key_of(score, id_):
    """`keys_of` inside a kernel: a block of float32 and one of int32, of numbers -> int64."""
    return (order_key(score).to(tl.int64) << 32) | (id_.to(tl.int64) ^ LOW)


@triton.jit
def id_of(offer):
    """Of an offer inside a kernel."""
    return tl.where(offer == NAN, FAILED, ((offer & LOW) ^ LOW).to(tl.int32))
