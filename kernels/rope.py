"""Per-head norm of q and k, rotary position embedding and the KV store, in one launch.

T tokens, Q and K query and KV heads of this rank, H head size, R rotated dimensions, P pages of N positions, L table length.
"""

import torch
from torch import Tensor

from kernels.rms_norm import rms_norm_torch


def rope_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor,
    locations: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Rotates q `[T, Q, H]` and k `[T, K, H]`, writes k and v `[T, K, H]` to the cache; returns q, contiguous `[T, Q, H]`.

    positions `[T]` int32 index table `[L, R]` float32, R even and at most H: the cosines of the R/2 frequencies, then their
    sines, any attention factor included. Dimension i is paired with i + R/2; dimensions from R on pass through.
    locations `[T]` int64: page * N + offset of each token in k_cache and v_cache `[P, N, K, H]`.
    q_norm and k_norm `[H]`: weights of an RMSNorm over each head before the rotation.
    All in float32 between load and store. q, k and v may be strided views whose last dimension is contiguous.
    """
    return rope_and_store_torch(q, k, v, positions, table, locations, k_cache, v_cache, q_norm, k_norm, eps)


def rope_and_store_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    table: Tensor,
    locations: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    cos, sin = table[positions.long()][:, None].chunk(2, dim=-1)
    rotated_k = _rotate(k.float() if k_norm is None else rms_norm_torch(k.float(), k_norm, eps), cos, sin)
    k_cache.view(-1, *k.shape[1:])[locations] = rotated_k.to(k_cache.dtype)
    v_cache.view(-1, *v.shape[1:])[locations] = v.to(v_cache.dtype)
    return _rotate(q.float() if q_norm is None else rms_norm_torch(q.float(), q_norm, eps), cos, sin).to(q.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)
