"""Weights for benchmarks without a checkpoint: a function of the tensor's name and each element's place in the whole tensor.

So every start draws the same, and ranks draw the parts of the same tensors, however many they are.
"""

import logging
import math
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from kernels.noise import gumbel
from services.worker.engine.interface import Progress
from services.worker.models.config import HFConfig
from services.worker.weights.shards import Piece, Shard, pieces

logger = logging.getLogger(__name__)

PIECE_ELEMENTS = 1 << 20
MEAN, DEVIATION = 0.5772156649, math.pi / math.sqrt(6)  # of standard Gumbel noise


def randomise(config: HFConfig, shards: Iterable[Shard], progress: Progress) -> None:
    """Fills every shard's target: norms with ones, all else with noise around 0 as wide as `initializer_range` (default 0.02)."""
    wanted = list(shards)
    total, done = sum(shard.target.numel() for shard in wanted), 0
    for shard in wanted:
        if shard.name.endswith("norm.weight"):
            shard.target.fill_(1.0)
        else:
            for piece in pieces(shard.ranges, shard.target, PIECE_ELEMENTS):
                piece.target.copy_(_noise(shard, piece).mul_(config.get("initializer_range", 0.02)))
        done += shard.target.numel()
        progress("making random weights", done / total)
    logger.warning("the weights are random: --load-format random is for benchmarks only")


def _noise(shard: Shard, piece: Piece) -> Tensor:
    """Of mean 0 and deviation 1, in the piece's shape."""
    device = piece.target.device
    places = torch.zeros((), dtype=torch.int64, device=device)
    for axis, part in enumerate(piece.ranges):
        stride = math.prod(shard.shape[axis + 1 :])
        places = places[..., None] + torch.arange(part.start, part.stop, device=device) * stride
    seed, position = (torch.tensor([value], device=device) for value in (zlib.crc32(shard.name.encode()), 0))
    return gumbel(seed, position, places.flatten()).sub_(MEAN).div_(DEVIATION).view(piece.target.shape)
