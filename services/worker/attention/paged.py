"""Attention of a mixed batch: decode rows by one kernel, prefill rows by another."""

import torch
from torch import Tensor

from kernels.decode_attention import decode_attention
from kernels.prefill_attention import prefill_attention
from services.worker.engine.batch import Batch
from services.worker.kvcache import LayerCache


def paged_attention(q: Tensor, cache: LayerCache, batch: Batch, scale: float) -> Tensor:
    """q `[T, Q, H]`, the decode rows' tokens first -> `[T, Q, H]`. The cache holds this step's keys and values already."""
    decode = batch.decode_rows
    parts = []
    if decode:
        parts.append(decode_attention(q[:decode], cache.k, cache.v, batch.page_table, batch.slots[:decode], batch.lengths[:decode], scale))
    if batch.rows > decode:
        parts.append(
            prefill_attention(
                q[decode:],
                cache.k,
                cache.v,
                batch.page_table,
                batch.slots[decode:],
                batch.query_starts,
                batch.lengths[decode:],
                batch.max_query,
                scale,
            )
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)
