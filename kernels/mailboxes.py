"""Memory of each rank that all ranks of a host can write to: what stands where in it, and how programs tell each other of it.

A launch's programs never wait for each other, only program b for program b of the other ranks. Each counts its own launches, its
epochs, in its mailbox, so that a captured launch counts on when it is replayed. What program b writes to alternates between two places:
a peer comes to epoch e + 2 only after it has heard of our epoch e + 1, which we begin after everything of epoch e was read.

All ranks make the same launches in the same order, on one stream each. Letters as in `all_reduce`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

MAX_RANKS = 8
BLOCKS = tl.constexpr(64)  # programs of a launch at most: all of them run at a time, or ranks would wait for what cannot start
LINE_BYTES = tl.constexpr(64)  # of signals: a word for each rank
WORDS = tl.constexpr(4096)  # that a program sends flagged
CHUNK_BYTES = tl.constexpr(1 << 18)  # that a program sends otherwise

# A mailbox: epochs int32 [BLOCKS]; signals int32 [2, phases, BLOCKS, LINE]; flagged words int64 [2, BLOCKS, ranks, WORDS]; chunks
# [2, BLOCKS, ranks, CHUNK_BYTES]. The twos are the alternating places.
SIGNALS = tl.constexpr(1024)
FLAGGED = tl.constexpr(SIGNALS.value + 2 * 2 * BLOCKS.value * LINE_BYTES.value)
FLAGGED_BYTES = tl.constexpr(2 * BLOCKS.value * WORDS.value * 8)  # for each rank, as is the next one
CHUNKS_BYTES = tl.constexpr(2 * BLOCKS.value * CHUNK_BYTES.value)


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
    return int(FLAGGED.value + size * (FLAGGED_BYTES.value + CHUNKS_BYTES.value))


@triton.jit
def mailbox_ptr(mailbox, offset, DTYPE: tl.constexpr):
    """mailbox: its address; offset: bytes, a multiple of 16."""
    return tl.multiple_of((mailbox + offset).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def flagged_offset(block, epoch, SIZE: tl.constexpr):
    """Bytes from a mailbox's beginning to the flagged words of a program in an epoch, int64 `[SIZE, WORDS]`."""
    return FLAGGED + ((epoch & 1) * BLOCKS + block).to(tl.int64) * (SIZE * WORDS * 8)


@triton.jit
def chunk_offset(block, epoch, SIZE: tl.constexpr):
    """The same to a program's chunks of an epoch, `[SIZE, CHUNK_BYTES]`."""
    return FLAGGED + SIZE * FLAGGED_BYTES + ((epoch & 1) * BLOCKS + block).to(tl.int64) * (SIZE * CHUNK_BYTES)


@triton.jit
def begin_epoch(addresses_ptr, block, RANK: tl.constexpr, PDL: tl.constexpr):
    """This rank's mailbox, where a program's last epoch stands in it, and the next one; x may be read from here on."""
    mailbox = tl.load(addresses_ptr + RANK)
    epoch_ptr = mailbox.to(tl.pointer_type(tl.int32)) + block
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    return mailbox, epoch_ptr, tl.load(epoch_ptr) + 1


@triton.jit
def meet(addresses_ptr, mailbox, block, epoch, phase: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Tells the peers that what was written to them is there, and waits until they have told the same.

    A signal is the epoch itself, at alternating places: a peer that is ahead does not overwrite the one that we wait for, and the
    comparison for equality holds when the count goes round.
    """
    line = SIGNALS + ((((epoch & 1) * 2 + phase) * BLOCKS + block) * LINE_BYTES).to(tl.int64)
    tl.debug_barrier()  # the writes of all threads come before the one thread's release
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            tl.atomic_xchg(mailbox_ptr(tl.load(addresses_ptr + peer), line, tl.int32) + RANK, epoch, sem="release", scope="sys")
    for source in tl.static_range(SIZE):
        if source != RANK:
            signal_ptr = mailbox_ptr(mailbox, line, tl.int32) + source
            seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
            while seen != epoch:
                seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
    tl.debug_barrier()  # the one thread's acquire comes before the reads of all
