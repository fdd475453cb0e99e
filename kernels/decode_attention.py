"""Attention of one query token a row over its paged KV cache.

B rows, Q and K query and KV heads of this rank, H head size, P pages of N positions, S slots.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """q `[B, Q, H]`, caches `[P, N, K, H]`, page_table `[S, max_pages]` int32, slots and lengths `[B]` int32 -> `[B, Q, H]`.

    Row b attends to the first `lengths[b]` positions of slot `slots[b]`, its own token included; with a window to the last
    `window` of them. Length 0 gives zeros. Whatever lies in pages or table entries past the length is never used.
    """
    return decode_attention_torch(q, k_cache, v_cache, page_table, slots, lengths, scale, window)


def decode_attention_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    (rows, q_heads, head_size), (_, page_size, kv_heads, _) = q.shape, k_cache.shape
    if rows == 0:
        return q.clone()
    num_pages = -(-max(int(lengths.max()), 1) // page_size)
    position = torch.arange(num_pages * page_size, device=q.device)
    inside = position < lengths[:, None]
    if window is not None:
        inside &= position >= lengths[:, None] - window
    pages = page_table[slots.long(), :num_pages].where(inside.view(rows, num_pages, page_size).any(dim=2), 0).flatten()
    k, v = (cache.flatten(1).index_select(0, pages).view(-1, kv_heads * head_size).float() for cache in (k_cache, v_cache))
    v.index_fill_(0, (~inside).flatten().nonzero()[:, 0], 0.0)  # may hold NaN, which a weight of 0 does not remove
    k, v = (x.view(rows, -1, kv_heads, head_size).transpose(1, 2) for x in (k, v))
    # The query heads that share a KV head take the place of query tokens.
    grouped = q.reshape(rows, kv_heads, -1, head_size).float()
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=inside[:, None, None], scale=scale)
    return out.reshape(rows, q_heads, head_size).masked_fill_((lengths == 0)[:, None, None], 0.0).to(q.dtype)
