"""Attention of a mixed batch: decode rows by one kernel, prefill rows by another."""

import torch
from torch import Tensor

from kernels.decode_attention import choose_splits, decode_attention
from kernels.prefill_attention import prefill_attention
from services.worker.engine.batch import Batch
from services.worker.kvcache import LayerCache

# Beside prefill few decode rows may stand among many of nobody, and a long one of them must not be one program's alone.
LEAST_SPLITS = 4


def paged_attention(q: Tensor, cache: LayerCache, batch: Batch, scale: float, window: int | None) -> Tensor:
    """q `[T, Q, H]`, the decode rows' tokens first -> `[T, Q, H]`. The cache holds this step's keys and values already."""
    decode, shape = batch.decode_rows, (cache.k, cache.v, batch.page_table)
    if batch.rows == decode:
        return decode_attention(q, *shape, batch.slots, batch.lengths, scale, window)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if decode:
        _, page_size, kv_heads, _ = cache.k.shape
        splits = choose_splits(decode, kv_heads, batch.page_table.shape[1] * page_size, q.device, LEAST_SPLITS)
        decode_attention(q[:decode], *shape, batch.slots[:decode], batch.lengths[:decode], scale, window, splits, out[:decode])
    slots, lengths = batch.slots[decode:], batch.lengths[decode:]
    prefill_attention(q[decode:], *shape, slots, batch.query_starts, lengths, batch.max_query, scale, window, out[decode:])
    return out
