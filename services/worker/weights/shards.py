"""Which part of which checkpoint tensor a rank keeps, and where it goes: the model says it, the loader does it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """`target` is filled from `checkpoint[name][index]`, converted to its dtype."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    index: tuple[slice, ...]  # what this rank reads of it
    target: Tensor  # a view of the parameter, of the index's shape
