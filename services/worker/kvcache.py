"""The paged KV cache of one rank. P pages of N tokens, K KV heads of this rank, H head size."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerCache:
    k: Tensor  # [P, N, K, H]
    v: Tensor  # [P, N, K, H]


@dataclass(frozen=True)
class CacheShape:
    layers: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Of one page in all layers, keys and values."""
        return 2 * self.layers * self.page_size * self.kv_heads * self.head_dim * self.dtype.itemsize


def allocate(shape: CacheShape, pages: int, device: torch.device) -> list[LayerCache]:
    """One cache a layer; page 0 is the scratch page. Not zeroed: nothing reads a position before it was written."""

    def empty() -> Tensor:
        return torch.empty(pages, shape.page_size, shape.kv_heads, shape.head_dim, dtype=shape.dtype, device=device)

    return [LayerCache(empty(), empty()) for _ in range(shape.layers)]
