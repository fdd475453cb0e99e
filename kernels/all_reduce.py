"""Sums over the GPUs of one host through each other's memory, alone or fused with the residual addition and RMSNorm that follow.

Every rank has a mailbox that all others can write to. A launch writes this rank's numbers into the others' mailboxes and adds up what
came into its own, in the order of the ranks, in float32: all ranks get the same bits. Three ways:

    flagged    every 4 bytes travel in one store with the number of the launch, and are polled for: nothing is waited for but the
               numbers themselves. Twice the bytes, for small messages.
    one-shot   everything to everyone, then one signal: released when the writes can be seen, acquired before they are read.
    two-shot   each rank adds up a share and passes the sum on: fewer bytes from four ranks on, a second signal.

W words of 4 bytes, T tokens, D hidden size.
"""

from collections.abc import Sequence
from enum import Enum

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, next_power_of_2, pdl_options
from kernels.mailboxes import (
    BLOCKS,
    CHUNK_BYTES,
    WORDS,
    Peers,
    begin_epoch,
    chunk_offset,
    flagged_offset,
    mailbox_ptr,
    meet,
)
from kernels.rms_norm import add_rms_norm_torch

TILE = 4096  # elements that a program has in flight
ALIGNED = 64  # elements: what a program has of a message, or a rank of that, is a multiple
LEAST_WORDS = 512  # of a program, while there are programs left: a 16-byte load for each thread of 4 warps
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Way(Enum):
    FLAGGED = "flagged"
    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"


# By ranks: messages up to so many bytes go in which way; larger ones are for the library. `python -m benchmarks allreduce` tells what
# each way takes, and what the library takes. For 2 ranks measured between two H200s with NVLink: flagged and one-shot take the same time
# at about 450 KiB, one-shot and two-shot at 8 MiB. For more ranks chosen by how often a byte crosses a link, not measured.
WAYS: dict[int, tuple[tuple[int, Way], ...]] = {
    2: ((3 << 17, Way.FLAGGED), (1 << 23, Way.ONE_SHOT), (1 << 24, Way.TWO_SHOT)),
    4: ((1 << 16, Way.FLAGGED), (1 << 19, Way.ONE_SHOT), (1 << 21, Way.TWO_SHOT)),
    8: ((1 << 15, Way.FLAGGED), (1 << 17, Way.ONE_SHOT), (1 << 20, Way.TWO_SHOT)),
}
# By ranks: up to so many bytes the norm is fused with the sum. Measured for 2: nowhere faster than a flagged sum and the norm behind it.
NORM_BYTES = {2: 0, 4: 1 << 17, 8: 1 << 16}


def fits(x: Tensor, way: Way) -> bool:
    """Whether a mailbox can take x: contiguous, of a dtype that is added up here, whole words, and not too large."""
    limit = BLOCKS.value * (4 * WORDS.value if way is Way.FLAGGED else CHUNK_BYTES.value)
    return x.dtype in TRITON_DTYPES and x.is_contiguous() and x.data_ptr() % 16 == 0 and x.nbytes % 4 == 0 and 0 < x.nbytes <= limit


def way_of(x: Tensor, size: int) -> Way | None:
    """How x is best added up over `size` ranks; None: by the library."""
    table = next((WAYS[ranks] for ranks in sorted(WAYS) if ranks >= size), ())
    way = next((way for most, way in table if x.nbytes <= most), None)
    return way if way is not None and fits(x, way) else None


def norm_fits(x: Tensor) -> bool:
    """Whether x `[T, D]` can be added up and normalised in one launch: each row by one program."""
    row_bytes = x.shape[1] * x.element_size()
    return len(x) <= BLOCKS.value and row_bytes <= 4 * WORDS.value and row_bytes % 16 == 0 and fits(x, Way.FLAGGED)


def norm_is_fused(x: Tensor, size: int) -> bool:
    """Whether x `[T, D]` is best added up and normalised in one launch."""
    most = next((NORM_BYTES[ranks] for ranks in sorted(NORM_BYTES) if ranks >= size), 0)
    return x.nbytes <= most and norm_fits(x)


def all_reduce_torch(parts: Sequence[Tensor]) -> Tensor:
    """What every rank gets of the ranks' parts, all alike in shape and dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def all_reduce_add_rms_norm_torch(parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return add_rms_norm_torch(all_reduce_torch(parts), residual, weight, eps)


def all_reduce(x: Tensor, peers: Peers, way: Way) -> Tensor:
    """The sum of all ranks' x, in place, for an x that `fits`; returns x."""
    if way is Way.FLAGGED:
        words = x.nbytes // 4
        width = max(LEAST_WORDS, next_power_of_2(cdiv(words, BLOCKS.value)))
        _flagged(x, None, None, x, words, width, 0.0, peers)
        return x
    count, blocks = x.numel(), min(BLOCKS.value, cdiv(x.numel(), TILE))
    to, options = (peers.addresses, count), {"num_warps": 16, **pdl_options(x.device)}
    if way is Way.TWO_SHOT:
        share = _aligned(count, blocks * peers.size)
        _two_shot_kernel[(blocks,)](x, *to, share, peers.rank, peers.size, min(TILE, next_power_of_2(share)), **options)
        return x
    _one_shot_kernel[(blocks,)](x, *to, _aligned(count, blocks), peers.rank, peers.size, TILE, **options)
    return x


def _aligned(count: int, parts: int) -> int:
    """Elements of one of so many parts: all but the last have as many, whole 16-byte accesses."""
    return cdiv(cdiv(count, parts), ALIGNED) * ALIGNED


def all_reduce_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: Peers) -> Tensor:
    """Adds the sum of all ranks' x `[T, D]` to residual `[T, D]` IN PLACE and returns the RMSNorm of that, `[T, D]` like x.

    The sum is rounded to the dtype, added, and rounded again before it is normalised, as if the two were apart. For an x whose
    `norm_fits`, with residual and weight of its dtype. Raises ValueError if residual is not contiguous.
    """
    if not residual.is_contiguous() or residual.dtype != x.dtype or weight.dtype != x.dtype:
        raise ValueError(f"residual must be a contiguous {x.dtype}, got {residual.dtype} with strides {residual.stride()}")
    y, width = torch.empty_like(x), x.shape[1] * x.element_size() // 4
    _flagged(x, residual, weight, y, x.nbytes // 4, width, eps, peers)
    return y


def _flagged(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, y: Tensor, words: int, width: int, eps: float, peers: Peers
) -> None:  # fmt: skip
    """width: words of a program."""
    x_words, y_words, residual_words, weight_words = (
        None if each is None else each.view(-1).view(torch.int32) for each in (x, y, residual, weight)
    )
    block = next_power_of_2(width)
    _flagged_kernel[(cdiv(words, width),)](
        x_words, residual_words, weight_words, y_words, peers.addresses, words, width, eps,
        peers.rank, peers.size, TRITON_DTYPES[x.dtype], residual is not None, block,
        num_warps=max(1, min(block // 128, 16)), **pdl_options(x.device),
    )  # fmt: skip


@triton.jit
def _flagged_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, addresses_ptr, words, width, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, DTYPE: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, word = tl.program_id(0), tl.arange(0, BLOCK)
    place = block * width + word
    inside = (word < width) & (place < words)
    if NORM:
        weight_low, weight_high = _unpacked(tl.load(weight_ptr + word, mask=inside, other=0), DTYPE)
    mailbox = tl.load(addresses_ptr + RANK)
    epoch_ptr = mailbox.to(tl.pointer_type(tl.int32)) + block
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + place, mask=inside, other=0)
    if NORM:
        residual = tl.load(residual_ptr + place, mask=inside, other=0)  # arrives while the peers' numbers are on their way
    epoch = tl.load(epoch_ptr) + 1
    flag = epoch.to(tl.int64) << 32
    message = flag | (x.to(tl.int64) & 0xFFFFFFFF)
    slot = flagged_offset(block, epoch, SIZE)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            inbox_ptr = mailbox_ptr(tl.load(addresses_ptr + peer), slot + RANK * WORDS * 8, tl.int64)
            # 8 bytes arrive whole or not at all, so these stores need no order among themselves.
            tl.store(inbox_ptr + word, message, mask=inside)
    tl.debug_barrier()  # none of them is put off until after the wait, where the peer would wait for us
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(SIZE):
        part = x
        if source != RANK:
            inbox_ptr = mailbox_ptr(mailbox, slot + source * WORDS * 8, tl.int64)
            got = tl.load(inbox_ptr + word, mask=inside, other=flag, volatile=True)
            while tl.max(((got >> 32).to(tl.int32) != epoch).to(tl.int32), axis=0) != 0:
                got = tl.load(inbox_ptr + word, mask=inside, other=flag, volatile=True)
            part = got.to(tl.int32)
        part_low, part_high = _unpacked(part, DTYPE)
        low += part_low
        high += part_high
    if NORM:
        residual_low, residual_high = _unpacked(residual, DTYPE)
        low = _rounded(_rounded(low, DTYPE) + residual_low, DTYPE)
        high = _rounded(_rounded(high, DTYPE) + residual_high, DTYPE)
        tl.store(residual_ptr + place, _packed(low, high, DTYPE), mask=inside)
        elements = width * (32 // DTYPE.primitive_bitwidth)
        scale = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / elements + eps)
        low = low * scale * weight_low
        high = high * scale * weight_high
    tl.store(y_ptr + place, _packed(low, high, DTYPE), mask=inside)
    tl.store(epoch_ptr, epoch)


@triton.jit
def _one_shot_kernel(
    x_ptr, addresses_ptr, count, chunk, RANK: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    block, offset = tl.program_id(0), tl.arange(0, TILE)
    first = block * chunk
    size = tl.minimum(count - first, chunk)
    mailbox, epoch_ptr, epoch = begin_epoch(addresses_ptr, block, RANK, PDL)
    slot = chunk_offset(block, epoch, SIZE)
    for start in range(0, size, TILE):
        element = start + offset
        x = tl.load(x_ptr + first + element, mask=element < size)
        _give(addresses_ptr, slot + RANK * CHUNK_BYTES, element, x, element < size, RANK, SIZE)
    meet(addresses_ptr, mailbox, block, epoch, 0, RANK, SIZE)
    for start in range(0, size, TILE):
        element = start + offset
        total = _sum(x_ptr, first, mailbox, slot, CHUNK_BYTES, element, element < size, RANK, SIZE, TILE)
        tl.store(x_ptr + first + element, total, mask=element < size)
    tl.store(epoch_ptr, epoch)


@triton.jit
def _two_shot_kernel(
    x_ptr, addresses_ptr, count, share, RANK: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A program adds up SIZE shares, one on each rank; the sums come behind the parts: `[2, SIZE, share]` of its chunks."""
    block, offset = tl.program_id(0), tl.arange(0, TILE)
    first = block * (share * SIZE)
    mailbox, epoch_ptr, epoch = begin_epoch(addresses_ptr, block, RANK, PDL)
    slot = chunk_offset(block, epoch, SIZE)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    share_bytes = share * (DTYPE.primitive_bitwidth // 8)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            inbox_ptr = mailbox_ptr(tl.load(addresses_ptr + peer), slot + RANK * share_bytes, DTYPE)
            begin = first + peer * share
            for start in range(0, share, TILE):
                element = start + offset
                inside = (element < share) & (begin + element < count)
                tl.store(inbox_ptr + element, tl.load(x_ptr + begin + element, mask=inside), mask=inside)
    meet(addresses_ptr, mailbox, block, epoch, 0, RANK, SIZE)
    begin = first + RANK * share
    for start in range(0, share, TILE):
        element = start + offset
        inside = (element < share) & (begin + element < count)
        total = _sum(x_ptr, begin, mailbox, slot, share_bytes, element, inside, RANK, SIZE, TILE).to(DTYPE)
        tl.store(x_ptr + begin + element, total, mask=inside)
        _give(addresses_ptr, slot + (SIZE + RANK) * share_bytes, element, total, inside, RANK, SIZE)
    meet(addresses_ptr, mailbox, block, epoch, 1, RANK, SIZE)
    for source in tl.static_range(SIZE):
        if source != RANK:
            sums_ptr = mailbox_ptr(mailbox, slot + (SIZE + source) * share_bytes, DTYPE)
            begin = first + source * share
            for start in range(0, share, TILE):
                element = start + offset
                inside = (element < share) & (begin + element < count)
                sums = tl.load(sums_ptr + element, mask=inside, cache_modifier=".cg")
                tl.store(x_ptr + begin + element, sums, mask=inside)
    tl.store(epoch_ptr, epoch)


@triton.jit
def _give(addresses_ptr, offset, element, x, inside, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Writes x, elements of what begins at this offset of a mailbox, into the mailboxes of all peers."""
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            inbox_ptr = mailbox_ptr(tl.load(addresses_ptr + peer), offset, x.dtype)
            tl.store(inbox_ptr + element, x, mask=inside)


@triton.jit
def _sum(
    own_ptr, first, mailbox, offset, part_bytes, element, inside, RANK: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The same elements of all ranks' parts, added in the order of the ranks, float32: this rank's from `first` on behind own_ptr, the
    others' from this offset of its mailbox on, each so many bytes behind the one before it."""
    total = tl.zeros([TILE], tl.float32)
    for source in tl.static_range(SIZE):
        part_ptr = own_ptr + first
        if source != RANK:
            part_ptr = mailbox_ptr(mailbox, offset + source * part_bytes, own_ptr.dtype.element_ty)
        total += tl.load(part_ptr + element, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit
def _unpacked(words, DTYPE: tl.constexpr):
    """The one or two numbers of each int32 word, float32; where it is one, the second is 0."""
    if DTYPE.primitive_bitwidth == 32:
        low = words.to(tl.float32, bitcast=True)
        high = tl.zeros_like(low)
    else:
        low = words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _packed(low, high, DTYPE: tl.constexpr):
    if DTYPE.primitive_bitwidth == 32:
        words = low.to(tl.int32, bitcast=True)
    else:
        upper = high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16
        words = upper | (low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)
    return words


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)
