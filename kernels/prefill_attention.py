"""Causal attention of prompt chunks over the paged KV cache, which already holds the chunks' own keys and values.

T query tokens of all rows, R rows, Q and K query and KV heads of this rank, H head size, P pages of N positions, S slots.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    max_query: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """q `[T, Q, H]`, caches `[P, N, K, H]`, page_table `[S, max_pages]` int32, slots and lengths `[R]` int32 -> `[T, Q, H]`.

    The queries `query_starts[r] .. query_starts[r + 1]` (`[R + 1]` int32, at most `max_query` a row) stand at the last
    positions of the `lengths[r]` tokens of slot `slots[r]`; each attends to its own position and those before it, with a
    window to the last `window` of them.
    """
    return prefill_attention_torch(q, k_cache, v_cache, page_table, slots, query_starts, lengths, max_query, scale, window)


def prefill_attention_torch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    max_query: int,
    scale: float,
    window: int | None = None,
) -> Tensor:
    page_size, kv_heads = k_cache.shape[1:3]
    group = q.shape[1] // kv_heads
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts, row_lengths = query_starts.tolist(), lengths.tolist()
    for row, length in enumerate(row_lengths):
        first, last = starts[row], starts[row + 1]
        if first == last:
            continue
        pages = page_table[slots[row].long(), : (length + page_size - 1) // page_size].long()
        k, v = (cache[pages].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1).transpose(0, 1) for cache in (k_cache, v_cache))
        queries = q[first:last].float().transpose(0, 1)
        if last - first == length and window is None:
            heads = F.scaled_dot_product_attention(queries[None], k[None], v[None], is_causal=True, scale=scale)
        else:
            query_position = torch.arange(length - (last - first), length, device=q.device)[:, None]
            distance = query_position - torch.arange(length, device=q.device)
            allowed = (distance >= 0) & (distance < (length if window is None else window))
            heads = F.scaled_dot_product_attention(queries[None], k[None], v[None], attn_mask=allowed, scale=scale)
        out[first:last] = heads[0].transpose(0, 1).to(q.dtype)
    return out
