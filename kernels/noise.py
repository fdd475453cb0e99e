"""Counter-based Gumbel noise: a pure function of (seed, position, vocabulary id), so that every rank, batch and retry draws the same.

A row has a key of 64 bits, output `position` of the SplitMix64 stream of `seed`. An id is hashed with it in 32 bits, since every logit of
every row needs one and a GPU multiplies 64 bits in many steps: MurmurHash3's finaliser of `id * odd + offset`, wrapping, where the key's
upper half, made odd, and its lower half are the line's slope and offset. So all ids below 2**32 of a row have hashes of their own, and
two ids have independent ones over the keys. The upper 23 bits of a hash are a uniform number.
"""

import triton
import triton.language as tl
from torch import Tensor

GREEDY_BELOW = tl.constexpr(1e-5)  # temperature under which a row is greedy: dividing by less overflows float32
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)  # SplitMix64's constants
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
HASH_1 = tl.constexpr(0x85EBCA6B)  # MurmurHash3's
HASH_2 = tl.constexpr(0xC2B2AE35)
LOW = tl.constexpr(2**32 - 1)
# With half a step added, the most that float32 holds exactly: 24 bits would round to a uniform of 1, whose noise is infinite.
UNIFORM_BITS = 23
UNIFORM_SHIFT = tl.constexpr(32 - UNIFORM_BITS)
UNIFORM_STEP = tl.constexpr(2.0**-UNIFORM_BITS)
FLOAT_STEP = tl.constexpr(2.0**-23)  # of a float32's bits: a unit of its exponent is 2**23 of them
ONE_BITS = tl.constexpr(0x3F800000)  # of the float32 1
BELOW_ONE = tl.constexpr(1 - 2.0**-24)
SERIES_BELOW = tl.constexpr(1 / 8)  # where its seventh term is as small as what the logarithm lacks
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # which knows no assembler
LN_2 = tl.constexpr(0.6931471805599453)


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """seeds `[B]` int64, positions `[B]` int32, global vocabulary ids `[V]` or `[B, V]` -> standard Gumbel noise `[B, V]` float32."""
    keys = _finalise(seeds + (positions.long() + 1) * _signed(GAMMA.value))[:, None]
    bits = _hash((ids.long() * (_shift_right(keys, 32) | 1) + keys) & LOW.value) >> UNIFORM_SHIFT.value
    uniform = (bits.float() + 0.5) * UNIFORM_STEP.value
    noise: Tensor = uniform.log_().neg_().log_().neg_()
    return noise


def _finalise(state: Tensor) -> Tensor:
    state = (state ^ _shift_right(state, 30)) * _signed(MIX_1.value)
    state = (state ^ _shift_right(state, 27)) * _signed(MIX_2.value)
    return state ^ _shift_right(state, 31)


def _hash(x: Tensor) -> Tensor:
    """int64 below 2**32, as what it returns."""
    x = ((x ^ (x >> 16)) * HASH_1.value) & LOW.value
    x = ((x ^ (x >> 13)) * HASH_2.value) & LOW.value
    return x ^ (x >> 16)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    shifted: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)  # torch has no unsigned 64-bit shift
    return shifted


def _signed(constant: int) -> int:
    return constant - 2**64


@triton.jit
def noisy_block(logits, temperature, seed, position, ids):
    """What `sample` compares: `logits / temperature + noise`, of ids as of `gumbel_block`."""
    return logits * (1 / temperature) + gumbel_block(seed, position, ids)


@triton.jit
def gumbel_block(seed, position, ids):
    """`gumbel` of one row inside a kernel: seed int64, position int32, ids a block of int32."""
    return gumbel_of(uniform_block(seed, position, ids))


@triton.jit
def gumbel_of(uniform):
    """The noise of a uniform number, within 1e-6 of itself or, where it is less than 1, of 1.

    By the hardware's logarithm, which is exact to 2**-22 of itself or, between a half and 2, of 1, in a third of the instructions. Close to
    1, where a logarithm is next to nothing, and the noise large, the series of -log(1 - rest) stands for it.
    """
    rest = 1 - uniform
    series = rest * (1 + rest * (1 / 2 + rest * (1 / 3 + rest * (1 / 4 + rest * (1 / 5 + rest * (1 / 6))))))
    exponential = tl.where(rest < SERIES_BELOW, series, -LN_2 * _log2(uniform))
    return -LN_2 * _log2(exponential)


@triton.jit
def _log2(x):
    """The hardware's, of normal numbers; Triton's own is exact to the last bits, at ten times the instructions."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def uniform_block(seed, position, ids):
    """What the noise is made of: above 0, below 1."""
    key = _finalise_block(seed.to(tl.uint64) + (position.to(tl.uint64) + 1) * GAMMA)
    x = ids.to(tl.uint32) * ((key >> 32).to(tl.uint32) | 1) + key.to(tl.uint32)
    x = (x ^ (x >> 16)) * HASH_1
    x = (x ^ (x >> 13)) * HASH_2
    x ^= x >> 16
    return ((x >> UNIFORM_SHIFT) | ONE_BITS).to(tl.float32, bitcast=True) - BELOW_ONE  # exact, and cheaper than a conversion


@triton.jit
def gumbel_bound(uniform):
    """At least the noise of a uniform number, and by 0.06 more where it is close to 1, at a tenth of the instructions.

    Since -log(u) is at least 1 - u; and the bits of a float32, its exponent and behind it its fraction, are a logarithm that is never
    too large.
    """
    bits = (1 - uniform).to(tl.int32, bitcast=True)
    return (127 - bits.to(tl.float32) * FLOAT_STEP) * LN_2


@triton.jit
def _finalise_block(state):
    state = (state ^ (state >> 30)) * MIX_1
    state = (state ^ (state >> 27)) * MIX_2
    return state ^ (state >> 31)
