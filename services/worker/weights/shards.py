"""Which part of which checkpoint tensor a rank keeps, and where it goes: the model says it, the loader does it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """`target` is filled from `checkpoint[name][index]`, converted to its dtype."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    index: tuple[slice, ...]  # what this rank reads of it; step 1
    target: Tensor  # a view of the parameter, of the index's shape

    @property
    def ranges(self) -> tuple[range, ...]:
        """`index` as the range of each dimension."""
        return tuple(range(*part.indices(size)) for part, size in zip(self.index, self.shape, strict=True))


@dataclass(frozen=True)
class Piece:
    """A part of a shard, small enough to hold in memory."""

    ranges: tuple[range, ...]  # in the whole tensor
    target: Tensor


def pieces(ranges: tuple[range, ...], target: Tensor, limit: int) -> Iterator[Piece]:
    """Cuts a shard into pieces of at most `limit` elements, halving the first dimension that can be."""
    size = math.prod(map(len, ranges))
    if size > limit:
        axis = next(axis for axis, part in enumerate(ranges) if len(part) > 1)
        middle = len(ranges[axis]) // 2
        for half in (slice(0, middle), slice(middle, None)):
            part = ranges[axis][half]
            narrowed = target.narrow(axis, half.start, len(part))
            yield from pieces((*ranges[:axis], part, *ranges[axis + 1 :]), narrowed, limit)
    elif size:
        yield Piece(ranges, target)
