"""Counter-based Gumbel noise: a pure function of (seed, position, vocabulary id), so that every rank, batch and retry draws the same.

Output n of the SplitMix64 stream of a state is `finalise(state + (n + 1) * GAMMA)`. The key of a row is output `position` of
the stream of `seed`; the noise of an id comes from output `id` of the stream of that key. All in wrapping 64-bit arithmetic.
"""

import triton
import triton.language as tl
from torch import Tensor

GAMMA = tl.constexpr(0x9E3779B97F4A7C15)  # SplitMix64's constants
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
# With half a step added, the most that float32 holds exactly: 24 bits would round to a uniform of 1, whose noise is infinite.
UNIFORM_BITS = 23
UNIFORM_SHIFT = tl.constexpr(64 - UNIFORM_BITS)
UNIFORM_STEP = tl.constexpr(2.0**-UNIFORM_BITS)


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """seeds `[B]` int64, positions `[B]` int32, global vocabulary ids `[V]` -> standard Gumbel noise `[B, V]` float32."""
    keys = _finalise(seeds + (positions.long() + 1) * _signed(GAMMA.value))
    state = keys[:, None] + (ids.long() + 1) * _signed(GAMMA.value)
    bits = _shift_right(_finalise(state), UNIFORM_SHIFT.value)
    uniform = (bits.float() + 0.5) * UNIFORM_STEP.value
    noise: Tensor = uniform.log_().neg_().log_().neg_()
    return noise


def _finalise(state: Tensor) -> Tensor:
    state = (state ^ _shift_right(state, 30)) * _signed(MIX_1.value)
    state = (state ^ _shift_right(state, 27)) * _signed(MIX_2.value)
    return state ^ _shift_right(state, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    shifted: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)  # torch has no unsigned 64-bit shift
    return shifted


def _signed(constant: int) -> int:
    return constant - 2**64


@triton.jit
def gumbel_block(seed, position, ids):
    """`gumbel` of one row inside a kernel: seed int64, position int32, ids a block of int32."""
    return gumbel_of(uniform_block(seed, position, ids))


@triton.jit
def uniform_block(seed, position, ids):
    """What the noise is made of: above 0, below 1."""
    key = _finalise_block(seed.to(tl.uint64) + (position.to(tl.uint64) + 1) * GAMMA)
    bits = _finalise_block(key + (ids.to(tl.uint64) + 1) * GAMMA) >> UNIFORM_SHIFT
    return (bits.to(tl.int32).to(tl.float32) + 0.5) * UNIFORM_STEP


@triton.jit
def gumbel_of(uniform):
    return -tl.log(-tl.log(uniform))


@triton.jit
def _finalise_block(state):
    state = (state ^ (state >> 30)) * MIX_1
    state = (state ^ (state >> 27)) * MIX_2
    return state ^ (state >> 31)
