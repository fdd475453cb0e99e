"""The table of rotary position embeddings. L positions, R rotated dimensions of a head."""

import torch
from torch import Tensor

from services.worker.models.config import RopeConfig


def rotary_table(rope: RopeConfig, length: int) -> Tensor:
    """`[L, R]` float32: the cosines of the R/2 frequencies at each position, then their sines.

    As long as the context that is admitted: a position past the table would read garbage.
    """
    frequencies = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / -rope.dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)
