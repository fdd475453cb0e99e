"""Finding what is large in a row of logits without sorting it: the k-th largest, and where a mass is reached.

A search compares with PIVOTS logits at a time: among columns that were gathered or, where they are more than there is room for,
among all of them until those between two pivots fit. A row is one program's; every sum has one order.
"""

import triton
import triton.language as tl

PIVOTS = tl.constexpr(8)  # 16 spill at WARPS warps
ROOM = 2048  # for the gathered columns of a row
WARPS = 16  # of the program: one number for all batches, since the order of sums hangs on it
LANES = tl.constexpr(32 * WARPS)
WIDTH = tl.constexpr(4)  # columns of a thread
LOG2_E = tl.constexpr(1.4426950408889634)
BLOCK = tl.constexpr(32 * WARPS * 4)


@triton.jit
def order_key(logits):
    """int32 with the order of the logits, each key that of one logit; -0 and 0 are equal."""
    bits = logits.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, (bits ^ 0x7FFFFFFF) + 1)


@triton.jit
def logit_of(key):
    """Of an order key."""
    bits = key.to(tl.int32)
    return tl.where(bits >= 0, bits, (bits - 1) ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def kth_largest_bound(keys, k):
    """A float32 that at least k of the keys reach, k at most their number, and hardly more than k."""
    low = tl.min(keys, axis=0).to(tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64) + 1
    reach_low = tl.full([], 2**30, tl.int32)
    while (high - low > 1) & (reach_low > k + k // 4 + 8):  # at least k reach low, fewer reach high
        step = tl.maximum((high - low) // PIVOTS, 1)
        pivots = tl.minimum(low + step * (tl.arange(0, PIVOTS) + 1), high)
        reached = tl.sum((keys[None, :] >= pivots[:, None]).to(tl.int32), axis=1)
        passed = tl.sum((reached >= k).to(tl.int32), axis=0)
        reach_low = tl.minimum(reach_low, tl.min(tl.where(reached >= k, reached, 2**30), axis=0))
        high = tl.where(passed < PIVOTS, tl.minimum(low + step * (passed + 1), high), high)
        low += step * passed
    return logit_of(low)


@triton.jit
def write_hits(hits_ptr, run, hit):
    """Numbers the runs that are hit, for `gather`; returns their count."""
    hits = hit.to(tl.int32)
    tl.store(hits_ptr + tl.cumsum(hits, axis=0) - 1, run, mask=hit)
    tl.debug_barrier()  # other threads read what was stored
    return tl.sum(hits, axis=0)


@triton.jit
def gather(row_ptr, hits_ptr, hits, ids_ptr, gathered_ptr, found, fails, holds, columns, RUN: tl.constexpr, ROOM: tl.constexpr):
    """Writes columns and logits of the keys above `fails` and up to `holds`, ascending, behind `found` others.

    Looks into those runs of RUN columns that hits_ptr names. Returns how many there are now, also past the room.
    """
    for start in tl.range(0, hits * RUN, BLOCK):
        index = start + tl.arange(0, BLOCK)
        column = tl.load(hits_ptr + index // RUN, mask=index // RUN < hits, other=2**23) * RUN + index % RUN
        logits = tl.load(row_ptr + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        keys = order_key(logits)
        wanted = ((keys > fails) & (keys <= holds) & (column < columns)).to(tl.int32)
        place = found + tl.cumsum(wanted, axis=0) - wanted
        fits = (wanted > 0) & (place < ROOM)
        tl.store(ids_ptr + place, column, mask=fits)
        tl.store(gathered_ptr + place, logits, mask=fits)
        found += tl.sum(wanted, axis=0)
    tl.debug_barrier()
    return found


@triton.jit
def find_cut(
    source_ptr, row_ptr, hits_ptr, ids_ptr, gathered_ptr, count, hits, found, fails, holds, largest, temperature, top_k, limit,
    columns, GATHERED: tl.constexpr, RUN: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The smallest key with fewer than top_k ids, and less mass than limit, strictly above it: the key, these two, how many equal it."""
    none, no_mass = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float32)
    room = 0 if GATHERED else ROOM
    fails, holds, inside, above, mass_above = _narrow(
        source_ptr, count, fails, holds, found, none, no_mass, room, largest, temperature, top_k, limit, GATHERED
    )
    if not GATHERED:  # noqa: SIM102 - one is known when this is compiled, the other is not
        if holds - fails > 1:  # else it is found, with more equal ones than there is room for
            gathered = gather(row_ptr, hits_ptr, hits, ids_ptr, gathered_ptr, none, fails, holds, columns, RUN, ROOM)
            fails, holds, inside, above, mass_above = _narrow(
                gathered_ptr, gathered, fails, holds, inside, above, mass_above, 0, largest, temperature, top_k, limit, True
            )
    return holds, above, mass_above, inside


@triton.jit
def _narrow(
    logits_ptr, count, fails, holds, inside, above, mass_above, room, largest, temperature, top_k, limit, GATHERED: tl.constexpr
):  # fmt: skip
    """Brings `fails` and `holds` together, until at most `room` keys lie above the one and up to the other, or they are neighbours.

    inside: how many these are; above and mass_above: how many lie above holds. GATHERED: the logits are those in between, else all.
    """
    base, base_mass = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float32)
    if GATHERED:
        base, base_mass = above, mass_above
    while (holds - fails > 1) & (inside > room):
        pivots = even_pivots(fails, holds)
        counts, masses = above_pivots(logits_ptr, count, pivots, largest, temperature, 1 if GATHERED else 3)
        counts += base
        masses += base_mass
        failed = ((counts >= top_k) | (masses >= limit)) & (pivots < holds)
        above_fails = tl.minimum(above + inside, tl.min(tl.where(failed, counts, 2**30), axis=0))
        fails = tl.maximum(fails, tl.max(tl.where(failed, pivots, fails), axis=0))
        least = tl.min(tl.where(failed, holds, pivots), axis=0)  # the smallest pivot that holds, or what held before
        if least < holds:
            above = tl.max(tl.where(pivots == least, counts, 0), axis=0)
            mass_above = tl.max(tl.where(pivots == least, masses, 0.0), axis=0)
        holds = least
        inside = above_fails - above
    return fails, holds, inside, above, mass_above


@triton.jit
def even_pivots(fails, holds):
    """PIVOTS keys above fails and up to holds, ascending: at even steps of the logit or, where these would take long, of the key."""
    number = tl.arange(0, PIVOTS) + 1
    low, high = logit_of(fails), logit_of(holds)
    even = (high - low < 1e4) & (holds - fails > 64)
    by_logit = order_key(tl.where(even, low, 0.0) + tl.where(even, high - low, 1.0) * (number / (PIVOTS + 1)))
    by_key = fails + tl.maximum((holds - fails) // (PIVOTS + 1), 1) * number
    return tl.minimum(tl.maximum(tl.where(even, by_logit.to(tl.int64), by_key), fails + 1), holds)


@triton.jit
def above_pivots(logits_ptr, count, pivots, largest, temperature, STAGES: tl.constexpr):
    """For each of the pivots, how many logits have a greater key, and their mass relative to the largest."""
    above = tl.zeros([PIVOTS, LANES], tl.int32)
    mass_above = tl.zeros([PIVOTS, LANES], tl.float32)
    limits = logit_of(pivots)[:, None, None]
    factor = LOG2_E / temperature
    place = tl.arange(0, WIDTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]  # what a thread adds up first is its own
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        index = start + place
        logits = tl.load(logits_ptr + index, mask=index < count, other=float("-inf")).to(tl.float32)
        is_above = logits[None, :, :] > limits
        above += tl.sum(is_above.to(tl.int32), axis=1)
        mass_above += tl.sum(tl.where(is_above, tl.exp2((logits - largest) * factor)[None, :, :], 0.0), axis=1)
    return tl.sum(above, axis=1), tl.sum(mass_above, axis=1)
