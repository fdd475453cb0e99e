"""Counter-based Gumbel noise: a pure function of (seed, position, vocabulary id), so that every rank, batch and retry draws the same.

Output n of the SplitMix64 stream of a state is `finalise(state + (n + 1) * GAMMA)`. The key of a row is output `position` of
the stream of `seed`; the noise of an id comes from output `id` of the stream of that key. All in wrapping 64-bit arithmetic.
"""

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15 - 2**64  # SplitMix64's constants, as signed 64-bit integers: torch has no unsigned shift or multiply
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64
UNIFORM_BITS = 23  # with half a step added, the most that float32 holds exactly: 24 bits would round to u = 1, infinite noise


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """seeds `[B]` int64, positions `[B]` int32, global vocabulary ids `[V]` -> standard Gumbel noise `[B, V]` float32."""
    keys = _finalise(seeds + (positions.long() + 1) * GAMMA)
    bits = _shift_right(_finalise(keys[:, None] + (ids.long() + 1) * GAMMA), 64 - UNIFORM_BITS)
    uniform = (bits.float() + 0.5) * 2.0**-UNIFORM_BITS
    return uniform.log_().neg_().log_().neg_()


def _finalise(state: Tensor) -> Tensor:
    state = (state ^ _shift_right(state, 30)) * MIX_1
    state = (state ^ _shift_right(state, 27)) * MIX_2
    return state ^ _shift_right(state, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & (2 ** (64 - bits) - 1)
