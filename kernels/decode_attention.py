"""Attention of one query token a row over its paged KV cache.

B rows, Q and K query and KV heads of this rank, H head size, P pages of N positions, S slots.
"""

import torch
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
    pages_used = max(int(lengths.max() + page_size - 1) // page_size, 1) if rows else 1
    position = torch.arange(pages_used * page_size, device=q.device)
    inside = position < lengths[:, None]
    if window is not None:
        inside &= position >= lengths[:, None] - window
    pages = page_table[slots.long(), :pages_used].long()
    pages = pages.where(inside.view(rows, pages_used, page_size).any(dim=2), 0)
    # Per row and KV head, [positions, H]; the copies are float32 and ours to mask in place.
    k = k_cache[pages].view(rows, -1, kv_heads, head_size).transpose(1, 2).float()
    v = v_cache[pages].view(rows, -1, kv_heads, head_size).masked_fill_(~inside[:, :, None, None], 0.0).transpose(1, 2).float()
    grouped = q.view(rows, kv_heads, -1, head_size).float() * scale
    scores = (grouped @ k.transpose(2, 3)).masked_fill_(~inside[:, None, None], -torch.inf)
    weights = torch.nan_to_num(scores.softmax(dim=-1)) if bool((lengths == 0).any()) else scores.softmax(dim=-1)
    return (weights @ v).view(rows, q_heads, head_size).to(q.dtype)
