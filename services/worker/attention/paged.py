"""Attention of a mixed batch: decode rows by one kernel, prefill rows by another, or all rows by the latter."""

import torch
from torch import Tensor

from kernels.decode_attention import decode_attention
from kernels.decode_splits import choose_splits
from kernels.prefill_attention import Config, prefill_attention, prefill_attention_triton
from services.worker.engine.batch import Batch
from services.worker.kvcache import LayerCache

# Beside prefill few decode rows may stand among many of nobody, and a long one of them must not be one program's alone.
LEAST_SPLITS = 4
FEW_QUERIES = Config(64, 64, 4, 3)  # of tiles that hold one decode row's queries mostly, heads of up to FEW_QUERIES_HEAD
FEW_QUERIES_HEAD = 128


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


def chunked_attention(q: Tensor, cache: LayerCache, batch: Batch, scale: float, window: int | None) -> Tensor:
    """Shapes and result as of `paged_attention`, on a GPU: decode rows are chunks of one token, so that a token's bits depend on the
    keys and values before it alone, however it is computed."""
    tuned = FEW_QUERIES if q.shape[2] <= FEW_QUERIES_HEAD and q.element_size() == 2 else None
    rows = batch.page_table, batch.slots, batch.row_starts, batch.lengths, max(batch.max_query, 1)
    return prefill_attention_triton(q, cache.k, cache.v, *rows, scale, window, None, tuned)
