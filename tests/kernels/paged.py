"""A paged KV cache for tests: what lies past a slot's length is NaN, in pages and beside them."""

import torch
from torch import Tensor

from tests.kernels.support import DEVICE, generator


class PagedCache:
    """k_cache and v_cache `[P, N, K, H]`; page_table `[S, max_pages]` over shuffled pages; lengths `[S]` on the host."""

    def __init__(self, lengths: list[int], kv_heads: int, head_size: int, page_size: int, dtype: torch.dtype, seed: int = 0) -> None:
        self.lengths = lengths
        max_pages = -(-max(lengths) // page_size) + 1
        order = torch.randperm(len(lengths) * max_pages, generator=generator(seed), device=DEVICE)
        self.page_table = order.view(len(lengths), max_pages).int()
        shape = (2, len(order), page_size, kv_heads, head_size)
        contents = torch.randn(shape, generator=generator(seed + 1), device=DEVICE).to(dtype)
        for slot, length in enumerate(lengths):
            for page, index in zip(self.page_table[slot].tolist(), range(max_pages), strict=True):
                contents[:, page, max(0, length - index * page_size) :] = torch.nan
        self.k_cache, self.v_cache = contents

    def tokens(self, slot: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a slot, `[length, K, H]` float64."""
        pages = self.page_table[slot].long()
        k, v = (cache[pages].flatten(0, 1)[: self.lengths[slot]].double() for cache in (self.k_cache, self.v_cache))
        return k, v


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """The definition in float64: q `[n, Q, H]` at the last n of the positions of k and v `[length, K, H]`."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    distance = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
    seen = (distance >= 0) & (distance < (window or len(k)))
    scores = torch.einsum("nqh,lqh->qnl", q.double(), k) * scale
    return torch.einsum("qnl,lqh->nqh", scores.masked_fill(~seen, -torch.inf).softmax(dim=-1), v)
