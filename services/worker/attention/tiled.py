"""Attention whose result for a token depends, bit by bit, on nothing but the keys and values before it. Slow, for deterministic mode.

Queries and positions are taken in tiles of one fixed shape, the positions' at multiples of their size: neither the batch nor
the chunk nor the page shows. A tile of positions that a query does not see adds exact zeros.

T tokens, Q and K query and KV heads of this rank, G = Q / K, H head size, L positions.
"""

import torch
from torch import Tensor

from services.worker.engine.batch import Batch
from services.worker.kvcache import LayerCache
from services.worker.layers.gemm import ROWS, padded

POSITIONS = 64  # of a tile
LEAST = -1e30  # below every score, and finite: a query that has seen nothing yet has no -inf minus -inf


def tiled_attention(q: Tensor, cache: LayerCache, batch: Batch, scale: float, window: int | None) -> Tensor:
    """Shapes and result as of `paged.paged_attention`."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    page_size = cache.k.shape[1]
    starts = [*range(batch.decode_rows), *(batch.decode_rows + batch.query_starts).tolist()]
    for row, length in enumerate(batch.lengths.tolist()):
        first, last = starts[row], starts[row + 1] if row + 1 < len(starts) else starts[row] + 1
        if length == 0 or first == last:
            continue
        pages = batch.page_table[batch.slots[row].long(), : -(-length // page_size)].long()
        k, v = (_tiles(pool[pages].flatten(0, 1)[:length].float()) for pool in (cache.k, cache.v))
        out[first:last] = _row(q[first:last].float(), k, v, length, scale, window).to(q.dtype)
    return out


def _tiles(x: Tensor) -> Tensor:
    """x `[L, K, H]` -> `[tiles, K, POSITIONS, H]`."""
    return padded(x, POSITIONS).view(-1, POSITIONS, *x.shape[1:]).transpose(1, 2).contiguous()


def _row(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float, window: int | None) -> Tensor:
    """q `[T, Q, H]` at the last T of the `length` positions in the tiles k and v -> `[T, Q, H]`."""
    (tokens, _, head_dim), kv_heads = q.shape, k.shape[1]
    packed = q.view(tokens, kv_heads, -1, head_dim).transpose(1, 2).flatten(0, 1)  # [T * G, K, H]
    positions = torch.arange(length - tokens, length).repeat_interleave(len(packed) // tokens)
    out = torch.empty_like(packed)
    for start in range(0, len(packed), ROWS):
        own = positions[start : start + ROWS]
        queries = padded(packed[start : start + ROWS], ROWS).transpose(0, 1).contiguous()
        part = _tile(queries, padded(own, ROWS), k, v, int(own[-1]) // POSITIONS + 1, scale, window)
        out[start : start + ROWS] = part.transpose(0, 1)[: len(own)]
    return out.view(tokens, -1, kv_heads, head_dim).transpose(1, 2).reshape(q.shape)


def _tile(q: Tensor, positions: Tensor, k: Tensor, v: Tensor, tiles: int, scale: float, window: int | None) -> Tensor:
    """q `[K, ROWS, H]` at positions `[ROWS]`, against the first `tiles` of k and v -> `[K, ROWS, H]`."""
    best = q.new_full((*q.shape[:2], 1), LEAST)
    total, weighted = torch.zeros_like(best), torch.zeros_like(q)
    for tile in range(tiles):
        distance = positions[:, None] - torch.arange(tile * POSITIONS, (tile + 1) * POSITIONS)
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        scores = (torch.bmm(q, k[tile].transpose(1, 2)) * scale).masked_fill(~seen, -torch.inf)
        new_best = torch.maximum(best, scores.amax(dim=2, keepdim=True))
        weights, shrink = (scores - new_best).exp(), (best - new_best).exp()
        total = total * shrink + weights.sum(dim=2, keepdim=True)
        weighted = weighted * shrink + torch.bmm(weights, v[tile])
        best = new_best
    return weighted / total
