"""Rotary position embedding: its table, made once for all positions that are admitted. T tokens, L positions, H head size.

Frequencies are computed in float32, in the order of transformers' operations: at position 100,000 another rounding of a
frequency is an angle that is off by a hundredth.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from services.worker.models.rope import AnyRope, DynamicRope, LinearRope, Llama3Rope, YarnRope


@dataclass(frozen=True)
class Rotation:
    """How the tokens of a batch are rotated; the same in all layers."""

    positions: Tensor  # [T] int32
    table: Tensor  # [L, H] float32: the cosines of the H/2 frequencies at each position, then their sines
    query_scale: Tensor | None  # [L] float32: a factor of the rotated queries by position


class Rotary(nn.Module):
    table: Tensor
    query_scale: Tensor | None

    def __init__(self, rope: AnyRope, head_dim: int, length: int) -> None:
        """length: the positions that are admitted. One past the table would read garbage."""
        super().__init__()
        self.register_buffer("table", rotary_table(rope, head_dim, length), persistent=False)
        self.register_buffer("query_scale", query_scale(rope, length), persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """positions `[T]` int32."""
        return Rotation(positions, self.table, self.query_scale)


def rotary_table(rope: AnyRope, head_dim: int, length: int) -> Tensor:
    """`[L, H]` float32; see Rotation."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies(rope, head_dim, length))
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor(rope)


def query_scale(rope: AnyRope, length: int) -> Tensor | None:
    """`[L]` float32: Ministral's growth of the queries by position, one step each time the original context is passed."""
    if not isinstance(rope, YarnRope) or rope.llama_4_scaling_beta is None:
        return None
    passed = torch.arange(length, dtype=torch.float32).div(rope.original_max_position_embeddings).floor()
    return 1 + rope.llama_4_scaling_beta * torch.log(1 + passed)


def attention_factor(rope: AnyRope) -> float:
    """Of cosines and sines, so that it scales queries and keys alike."""
    if not isinstance(rope, YarnRope):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def frequencies(rope: AnyRope, head_dim: int, length: int) -> Tensor:
    """`[H/2]` float32, in radians a position."""
    match rope:
        case LinearRope():
            return _plain(rope.rope_theta, head_dim) / rope.factor
        case DynamicRope():
            grown = rope.factor * max(length, rope.max_position_embeddings) / rope.max_position_embeddings - (rope.factor - 1)
            return _plain(rope.rope_theta * grown ** (head_dim / (head_dim - 2)), head_dim)
        case Llama3Rope():
            return _llama3(rope, _plain(rope.rope_theta, head_dim))
        case YarnRope():
            return _yarn(rope, head_dim)
        case _:
            return _plain(rope.rope_theta, head_dim)


def _plain(theta: float, head_dim: int) -> Tensor:
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))


def _llama3(rope: Llama3Rope, plain: Tensor) -> Tensor:
    rotations = rope.original_max_position_embeddings / (2 * math.pi / plain)  # within the original context
    smooth = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    return torch.where(
        rotations < rope.low_freq_factor, plain / rope.factor, torch.where(rotations > rope.high_freq_factor, plain, between)
    )


def _yarn(rope: YarnRope, head_dim: int) -> Tensor:
    def dimension(rotations: float) -> float:
        """The dimension pair, as a real number, that rotates so often within the original context."""
        ratio = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    powers = rope.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
