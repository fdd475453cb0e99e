"""Sums over the GPUs of one host through each other's memory, alone or fused with the residual addition and RMSNorm that follow.

Every rank has a mailbox that all others can write to. A launch writes this rank's numbers into the others' mailboxes and adds up what
came into its own, in the order of the ranks, in float32: all ranks get the same bits. Four ways:

    flagged    every 4 bytes travel in one store with the number of the launch, and are polled for: nothing is waited for but the
               numbers themselves. Twice the bytes, for small messages.
    one-shot   everything to everyone, then one signal: released when the writes can be seen, acquired before they are read.
    two-shot   each rank adds up a share and passes the sum on: fewer bytes from four ranks on, a second signal.
    streamed   one-shot in pieces, an epoch each: one travels while the one before it is added up. For messages of any size.

A launch's programs never wait for each other, only program b for program b of the other ranks. Each counts its own launches, its
epochs, in its mailbox, so that a captured launch counts on when it is replayed. What program b writes to alternates between two places:
a peer comes to epoch e + 2 only after it has heard of our epoch e + 1, which we begin after everything of epoch e was read. Pieces go
to four places in turn: a peer writes piece n after it has heard of our piece n - 2, which we tell of after piece n - 3 was read.

All ranks make the same launches in the same order, on one stream each. W words of 4 bytes, T tokens, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import pdl_options
from kernels.rms_norm import add_rms_norm_torch

BLOCKS = tl.constexpr(64)  # programs of a launch at most: all of them run at a time, or ranks would wait for what cannot start
LINE_BYTES = tl.constexpr(64)  # of signals: a word for each rank
WORDS = tl.constexpr(4096)  # that a program sends flagged
CHUNK_BYTES = tl.constexpr(1 << 18)  # that a program sends otherwise
PIECE_BYTES = tl.constexpr(1 << 15)  # at most, of a streamed message
PIECES = 4  # of a program, while they are not smaller than a tile
TILE = 4096  # elements that a program has in flight
ALIGNED = 64  # elements of a share of the two-shot way: whole 16-byte accesses
LEAST_WORDS = 512  # of a program, while there are programs left: a 16-byte load for each thread of 4 warps

# A mailbox: epochs int32 [BLOCKS]; signals int32 [2, phases, BLOCKS, LINE], those of pieces int32 [4, BLOCKS, LINE]; flagged words
# int64 [2, BLOCKS, ranks, WORDS]; chunks [2, BLOCKS, ranks, CHUNK_BYTES]; pieces [4, BLOCKS, ranks, PIECE_BYTES]. The twos and fours
# are the alternating places.
SIGNALS = tl.constexpr(1024)
PIECE_SIGNALS = tl.constexpr(SIGNALS.value + 2 * 2 * BLOCKS.value * LINE_BYTES.value)
FLAGGED = tl.constexpr(PIECE_SIGNALS.value + 4 * BLOCKS.value * LINE_BYTES.value)
FLAGGED_BYTES = tl.constexpr(2 * BLOCKS.value * WORDS.value * 8)  # for each rank, as are the next two
CHUNKS_BYTES = tl.constexpr(2 * BLOCKS.value * CHUNK_BYTES.value)
PIECES_BYTES = tl.constexpr(4 * BLOCKS.value * PIECE_BYTES.value)
MAX_ELEMENTS = 1 << 30  # of a streamed message: places in it are int32
TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Way(Enum):
    FLAGGED = "flagged"
    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"
    STREAMED = "streamed"


# By ranks: messages up to so many bytes go in which way; larger ones are for the library. `python -m benchmarks allreduce` tells what
# each way takes, and what the library takes. For 2 ranks measured between two H200s with NVLink: flagged and one-shot take the same time
# at about 450 KiB, two-shot is nowhere faster. For more ranks chosen by how often a byte crosses a link, not measured.
WAYS: dict[int, tuple[tuple[int, Way], ...]] = {
    2: ((3 << 17, Way.FLAGGED), (1 << 24, Way.ONE_SHOT)),
    4: ((1 << 16, Way.FLAGGED), (1 << 19, Way.ONE_SHOT), (1 << 21, Way.TWO_SHOT)),
    8: ((1 << 15, Way.FLAGGED), (1 << 17, Way.ONE_SHOT), (1 << 20, Way.TWO_SHOT)),
}
MAX_RANKS = max(WAYS)
# By ranks: up to so many bytes the norm is fused with the sum. Measured for 2: nowhere faster than a flagged sum and the norm behind it.
NORM_BYTES = {2: 0, 4: 1 << 17, 8: 1 << 16}


@dataclass(frozen=True)
class Peers:
    """The mailboxes of a group, as one of its ranks sees them."""

    rank: int
    size: int
    addresses: Tensor  # [size] int64 on this rank's device: where each rank's mailbox is; zeroed before any rank's first launch


def mailbox_bytes(size: int) -> int:
    """Of each of `size` ranks. Raises ValueError for more than MAX_RANKS."""
    if size > MAX_RANKS:
        raise ValueError(f"at most {MAX_RANKS} ranks share memory, got {size}")
    return int(FLAGGED.value + size * (FLAGGED_BYTES.value + CHUNKS_BYTES.value + PIECES_BYTES.value))


def fits(x: Tensor, way: Way) -> bool:
    """Whether a mailbox can take x: contiguous, of a dtype that is added up here, whole words, and not too large."""
    limit = BLOCKS.value * (4 * WORDS.value if way is Way.FLAGGED else CHUNK_BYTES.value)
    if way is Way.STREAMED:
        limit = MAX_ELEMENTS * x.element_size()
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
        width = max(LEAST_WORDS, triton.next_power_of_2(triton.cdiv(words, BLOCKS.value)))
        _flagged(x, None, None, x, words, width, 0.0, peers)
    elif way is Way.ONE_SHOT:
        count = x.numel()
        blocks = min(BLOCKS.value, triton.cdiv(count, TILE))
        chunk = triton.cdiv(triton.cdiv(count, blocks), ALIGNED) * ALIGNED
        _one_shot_kernel[(blocks,)](
            x, peers.addresses, count, chunk, peers.rank, peers.size, TILE, num_warps=16, **pdl_options(x.device)
        )  # fmt: skip
    elif way is Way.STREAMED:
        count = x.numel()
        blocks = min(BLOCKS.value, triton.cdiv(count, TILE))
        chunk = triton.cdiv(triton.cdiv(count, blocks), ALIGNED) * ALIGNED
        piece = min(triton.cdiv(triton.cdiv(chunk, PIECES), TILE) * TILE, PIECE_BYTES.value // x.element_size())
        _streamed_kernel[(blocks,)](
            x, peers.addresses, count, chunk, piece, peers.rank, peers.size, TILE, num_warps=16, **pdl_options(x.device)
        )  # fmt: skip
    else:
        count = x.numel()
        blocks = min(BLOCKS.value, triton.cdiv(count, TILE))
        share = triton.cdiv(triton.cdiv(count, blocks * peers.size), ALIGNED) * ALIGNED
        _two_shot_kernel[(blocks,)](
            x, peers.addresses, count, share, peers.rank, peers.size, min(TILE, triton.next_power_of_2(share)),
            num_warps=16, **pdl_options(x.device),
        )  # fmt: skip
    return x


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
    block = triton.next_power_of_2(width)
    _flagged_kernel[(triton.cdiv(words, width),)](
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
    slot = FLAGGED + ((epoch & 1) * BLOCKS + block).to(tl.int64) * (SIZE * WORDS * 8)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            inbox_ptr = _mailbox_ptr(tl.load(addresses_ptr + peer), slot + RANK * WORDS * 8, tl.int64)
            # 8 bytes arrive whole or not at all, so these stores need no order among themselves.
            tl.store(inbox_ptr + word, message, mask=inside)
    tl.debug_barrier()  # none of them is put off until after the wait, where the peer would wait for us
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(SIZE):
        part = x
        if source != RANK:
            inbox_ptr = _mailbox_ptr(mailbox, slot + source * WORDS * 8, tl.int64)
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
def _begin(addresses_ptr, block, RANK: tl.constexpr, PDL: tl.constexpr):
    """This rank's mailbox, where a program's last epoch stands in it, and the next one; x may be read from here on."""
    mailbox = tl.load(addresses_ptr + RANK)
    epoch_ptr = mailbox.to(tl.pointer_type(tl.int32)) + block
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    return mailbox, epoch_ptr, tl.load(epoch_ptr) + 1


@triton.jit
def _one_shot_kernel(
    x_ptr, addresses_ptr, count, chunk, RANK: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    block, offset = tl.program_id(0), tl.arange(0, TILE)
    first = block * chunk
    size = tl.minimum(count - first, chunk)
    mailbox, epoch_ptr, epoch = _begin(addresses_ptr, block, RANK, PDL)
    slot = _chunks(block, epoch, SIZE)
    for start in range(0, size, TILE):
        element = start + offset
        x = tl.load(x_ptr + first + element, mask=element < size)
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                inbox_ptr = _mailbox_ptr(tl.load(addresses_ptr + peer), slot + RANK * CHUNK_BYTES, x_ptr.dtype.element_ty)
                tl.store(inbox_ptr + element, x, mask=element < size)
    _meet(addresses_ptr, mailbox, block, epoch, 0, RANK, SIZE)
    for start in range(0, size, TILE):
        element = start + offset
        total = tl.zeros([TILE], tl.float32)
        for source in tl.static_range(SIZE):
            part_ptr = x_ptr + first
            if source != RANK:
                part_ptr = _mailbox_ptr(mailbox, slot + source * CHUNK_BYTES, x_ptr.dtype.element_ty)
            total += tl.load(part_ptr + element, mask=element < size, other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(x_ptr + first + element, total, mask=element < size)
    tl.store(epoch_ptr, epoch)


@triton.jit
def _two_shot_kernel(
    x_ptr, addresses_ptr, count, share, RANK: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A program adds up SIZE shares, one on each rank; the sums come behind the parts: `[2, SIZE, share]` of its chunks."""
    block, offset = tl.program_id(0), tl.arange(0, TILE)
    first = block * (share * SIZE)
    mailbox, epoch_ptr, epoch = _begin(addresses_ptr, block, RANK, PDL)
    slot = _chunks(block, epoch, SIZE)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    share_bytes = share * (DTYPE.primitive_bitwidth // 8)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            inbox_ptr = _mailbox_ptr(tl.load(addresses_ptr + peer), slot + RANK * share_bytes, DTYPE)
            begin = first + peer * share
            for start in range(0, share, TILE):
                element = start + offset
                inside = (element < share) & (begin + element < count)
                tl.store(inbox_ptr + element, tl.load(x_ptr + begin + element, mask=inside), mask=inside)
    _meet(addresses_ptr, mailbox, block, epoch, 0, RANK, SIZE)
    begin = first + RANK * share
    for start in range(0, share, TILE):
        element = start + offset
        inside = (element < share) & (begin + element < count)
        total = tl.zeros([TILE], tl.float32)
        for source in tl.static_range(SIZE):
            part_ptr = x_ptr + begin
            if source != RANK:
                part_ptr = _mailbox_ptr(mailbox, slot + source * share_bytes, DTYPE)
            total += tl.load(part_ptr + element, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        sum_ = total.to(DTYPE)
        tl.store(x_ptr + begin + element, sum_, mask=inside)
        for peer in tl.static_range(SIZE):
            if peer != RANK:
                sums_ptr = _mailbox_ptr(tl.load(addresses_ptr + peer), slot + (SIZE + RANK) * share_bytes, DTYPE)
                tl.store(sums_ptr + element, sum_, mask=inside)
    _meet(addresses_ptr, mailbox, block, epoch, 1, RANK, SIZE)
    for source in tl.static_range(SIZE):
        if source != RANK:
            sums_ptr = _mailbox_ptr(mailbox, slot + (SIZE + source) * share_bytes, DTYPE)
            begin = first + source * share
            for start in range(0, share, TILE):
                element = start + offset
                inside = (element < share) & (begin + element < count)
                sums = tl.load(sums_ptr + element, mask=inside, cache_modifier=".cg")
                tl.store(x_ptr + begin + element, sums, mask=inside)
    tl.store(epoch_ptr, epoch)


@triton.jit
def _streamed_kernel(
    x_ptr, addresses_ptr, count, chunk, piece, RANK: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    block, offset = tl.program_id(0), tl.arange(0, TILE)
    first = block * chunk
    size = tl.minimum(count - first, chunk)
    mailbox, epoch_ptr, epoch = _begin(addresses_ptr, block, RANK, PDL)  # of the first piece
    pieces = tl.maximum(tl.cdiv(size, piece), 0)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    for number in range(pieces + 1):
        if number < pieces:
            own_ptr = x_ptr + first + number * piece
            length = tl.minimum(size - number * piece, piece)
            slot = _pieces(block, epoch + number, SIZE)
            for start in range(0, length, TILE):
                element = start + offset
                x = tl.load(own_ptr + element, mask=element < length)
                for peer in tl.static_range(SIZE):
                    if peer != RANK:
                        inbox_ptr = _mailbox_ptr(tl.load(addresses_ptr + peer), slot + RANK * PIECE_BYTES, DTYPE)
                        tl.store(inbox_ptr + element, x, mask=element < length)
        if number > 0:  # the one before, while this one travels
            before = number - 1
            own_ptr = x_ptr + first + before * piece
            length = tl.minimum(size - before * piece, piece)
            slot = _pieces(block, epoch + before, SIZE)
            _hear(mailbox, _piece_line(block, epoch + before), epoch + before, RANK, SIZE)
            for start in range(0, length, TILE):
                element = start + offset
                total = tl.zeros([TILE], tl.float32)
                for source in tl.static_range(SIZE):
                    part_ptr = own_ptr
                    if source != RANK:
                        part_ptr = _mailbox_ptr(mailbox, slot + source * PIECE_BYTES, DTYPE)
                    total += tl.load(part_ptr + element, mask=element < length, other=0.0, cache_modifier=".cg").to(tl.float32)
                tl.store(own_ptr + element, total.to(DTYPE), mask=element < length)
        if number < pieces:
            _tell(addresses_ptr, _piece_line(block, epoch + number), epoch + number, RANK, SIZE)
    tl.store(epoch_ptr, epoch + pieces - 1)


@triton.jit
def _meet(addresses_ptr, mailbox, block, epoch, phase: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Tells the peers that what was written to them is there, and waits until they have told the same."""
    line = SIGNALS + ((((epoch & 1) * 2 + phase) * BLOCKS + block) * LINE_BYTES).to(tl.int64)
    _tell(addresses_ptr, line, epoch, RANK, SIZE)
    _hear(mailbox, line, epoch, RANK, SIZE)


@triton.jit
def _piece_line(block, epoch):
    return PIECE_SIGNALS + (((epoch & 3) * BLOCKS + block) * LINE_BYTES).to(tl.int64)


@triton.jit
def _tell(addresses_ptr, line, epoch, RANK: tl.constexpr, SIZE: tl.constexpr):
    """A signal is the epoch itself, at alternating places: a peer that is ahead does not overwrite the one that we wait for, and the
    comparison for equality holds when the count goes round."""
    tl.debug_barrier()  # the writes of all threads come before the one thread's release
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.atomic_xchg(_mailbox_ptr(tl.load(addresses_ptr + peer), line, tl.int32) + RANK, epoch, sem="release", scope="sys")


@triton.jit
def _hear(mailbox, line, epoch, RANK: tl.constexpr, SIZE: tl.constexpr):
    for source in tl.static_range(SIZE):
        if source != RANK:
            signal_ptr = _mailbox_ptr(mailbox, line, tl.int32) + source
            seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
            while seen != epoch:
                seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
    tl.debug_barrier()  # the one thread's acquire comes before the reads of all


@triton.jit
def _mailbox_ptr(mailbox, offset, DTYPE: tl.constexpr):
    """mailbox: its address; offset: bytes, a multiple of 16."""
    return tl.multiple_of((mailbox + offset).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _chunks(block, epoch, SIZE: tl.constexpr):
    """Bytes from a mailbox's beginning to the chunks of a program in an epoch, `[SIZE, CHUNK_BYTES]`."""
    return FLAGGED + SIZE * FLAGGED_BYTES + ((epoch & 1) * BLOCKS + block).to(tl.int64) * (SIZE * CHUNK_BYTES)


@triton.jit
def _pieces(block, epoch, SIZE: tl.constexpr):
    """The same to a program's piece of an epoch, `[SIZE, PIECE_BYTES]`."""
    return FLAGGED + SIZE * (FLAGGED_BYTES + CHUNKS_BYTES) + ((epoch & 3) * BLOCKS + block).to(tl.int64) * (SIZE * PIECE_BYTES)


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
