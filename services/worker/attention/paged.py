"""Attention of a mixed batch: decode rows by one kernel, prefill rows by another."""

import torch
from torch import Tensor

from kernels.decode_attention import decode_attention
from kernels.prefill_attention import prefill_attention
from services.worker.engine.batch import Batch
from services.worker.kvcache import LayerCache


def paged_attention(q: Tensor, cache: LayerCache, batch: Batch, scale: float, window: int | None) -> Tensor:
    """q `[T, Q, H]`, the decode rows' tokens first -> `[T, Q, H]`. The cache holds this step's keys and values already."""
    decode = batch.decode_rows
    parts = []
    if decode:
        slots, lengths = batch.slots[:decode], batch.lengths[:decode]
        parts.append(decode_attention(q[:decode], cache.k, cache.v, batch.page_table, slots, lengths, scale, window))
    if batch.rows > decode:
        slots, lengths, starts = batch.slots[decode:], batch.lengths[decode:], batch.query_starts
        table, most = batch.page_table, batch.max_query
        parts.append(prefill_attention(q[decode:], cache.k, cache.v, table, slots, starts, lengths, most, scale, window))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
