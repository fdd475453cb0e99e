"""Per-head norm of q and k, rotary position embedding and the KV store, in one launch.

T tokens, Q and K query and KV heads of this rank, H head size, R rotated dimensions, P pages of N positions, L table length.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import cdiv, multiprocessors, next_power_of_2, pdl_options
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
    query_scale: Tensor | None = None,
    heads: int | None = None,
) -> Tensor:
    """Rotates q `[T, Q, H]` and k `[T, K, H]`, writes k and v `[T, K, H]` to the cache; returns q, contiguous `[T, Q, H]`.

    positions `[T]` int32 index table `[L, R]` float32, R even and at most H: the cosines of the R/2 frequencies, then their
    sines, any attention factor included. Dimension i is paired with i + R/2; dimensions from R on pass through.
    locations `[T]` int64: page * N + offset of each token in k_cache and v_cache `[P, N, K, H]`.
    q_norm and k_norm `[H]`: weights of an RMSNorm over each head before the rotation.
    query_scale `[L]` float32: a factor of the rotated queries by position.
    heads: of a program on a GPU, a power of two; chosen by shape if None. With a fixed number a token's result does not depend on the
    others, bit by bit.
    All in float32 between load and store. q, k and v may be strided views whose last dimension is contiguous.
    On a GPU positions and locations must not come from the kernel just before: they are read ahead of its end.
    Raises ValueError for other strides and for a cache that is not contiguous.
    """
    check_strides(q, k, v, k_cache, v_cache)
    if not q.is_cuda:
        return rope_and_store_torch(q, k, v, positions, table, locations, k_cache, v_cache, q_norm, k_norm, eps, query_scale)
    return rope_and_store_triton(q, k, v, positions, table, locations, k_cache, v_cache, q_norm, k_norm, eps, query_scale, heads)


def check_strides(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raises ValueError for heads whose last dimension is not contiguous, and for a cache that is not."""
    if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError(f"the last dimension of q, k and v must be contiguous, got strides {q.stride()}, {k.stride()}, {v.stride()}")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError(f"the caches must be contiguous [P, N, K, H], got strides {k_cache.stride()} and {v_cache.stride()}")


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
    query_scale: Tensor | None = None,
) -> Tensor:
    cos, sin = table[positions.long()][:, None].chunk(2, dim=-1)
    rotated_k = _rotate(k.float() if k_norm is None else rms_norm_torch(k.float(), k_norm, eps), cos, sin)
    k_cache.view(-1, *k.shape[1:])[locations] = rotated_k.to(k_cache.dtype)
    v_cache.view(-1, *v.shape[1:])[locations] = v.to(v_cache.dtype)
    rotated_q = _rotate(q.float() if q_norm is None else rms_norm_torch(q.float(), q_norm, eps), cos, sin)
    if query_scale is not None:
        rotated_q *= query_scale[positions.long()][:, None, None]
    return rotated_q.to(q.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


def rope_and_store_triton(
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
    query_scale: Tensor | None = None,
    heads: int | None = None,
) -> Tensor:
    (tokens, q_heads, head_size), kv_heads, rotated = q.shape, k.shape[1], table.shape[1]
    out = q.new_empty(tokens, q_heads, head_size)
    if tokens == 0:
        return out
    # One head a program while that leaves multiprocessors idle, then enough heads that a program moves a few kilobytes.
    few = tokens * (q_heads + kv_heads) <= 16 * multiprocessors(q.device)
    heads = heads or (1 if few else min(next_power_of_2(kv_heads), 8))
    _rope_and_store_kernel[(tokens, cdiv(q_heads, heads) + cdiv(kv_heads, heads))](
        q, k, v, positions, table, locations, k_cache, v_cache, q_norm, k_norm, query_scale, out,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], eps, q_heads, kv_heads, head_size, rotated // 2,
        q_norm is not None, k_norm is not None, query_scale is not None, heads, next_power_of_2(rotated // 2),
        next_power_of_2(head_size - rotated) if rotated < head_size else 0, next_power_of_2(head_size),
        num_warps=1 if heads == 1 else 4, **pdl_options(q.device),
    )  # fmt: skip
    return out


@triton.jit
def _rope_and_store_kernel(
    q_ptr, k_ptr, v_ptr, positions_ptr, table_ptr, locations_ptr, k_cache_ptr, v_cache_ptr, q_norm_ptr, k_norm_ptr,
    query_scale_ptr, out_ptr, q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, eps,
    Q: tl.constexpr, K: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    SCALED: tl.constexpr, HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    frequency = tl.arange(0, HALF_BLOCK)[None, :]
    position = tl.load(positions_ptr + token)
    row = table_ptr + position.to(tl.int64) * 2 * HALF + frequency
    cos = tl.load(row, mask=frequency < HALF, other=0.0)
    sin = tl.load(row + HALF, mask=frequency < HALF, other=0.0)
    location = tl.load(locations_ptr + token)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # first: attention has to ask for keys and values of earlier steps, see launch.py
        tl.extra.cuda.gdc_wait()
    q_blocks: tl.constexpr = (Q + HEADS - 1) // HEADS
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)[:, None]
        scale = 1.0
        if SCALED:
            scale = tl.load(query_scale_ptr + position)
        source, destination = q_ptr + token * q_token_stride + head * q_head_stride, out_ptr + (token * Q + head) * H
        _rotate_heads(source, destination, head < Q, q_norm_ptr, cos, sin, eps, scale, H, HALF, Q_NORM, HALF_BLOCK, REST_BLOCK)
    else:
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)[:, None]
        place = (location * K + head) * H
        source = k_ptr + token * k_token_stride + head * k_head_stride
        _rotate_heads(source, k_cache_ptr + place, head < K, k_norm_ptr, cos, sin, eps, 1.0, H, HALF, K_NORM, HALF_BLOCK, REST_BLOCK)
        dimension = tl.arange(0, HEAD_BLOCK)[None, :]
        inside = (head < K) & (dimension < H)
        values = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + dimension, mask=inside, other=0.0)
        tl.store(v_cache_ptr + place + dimension, values, mask=inside)


@triton.jit
def _rotate_heads(
    source, destination, inside, norm_ptr, cos, sin, eps, factor,
    H: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """source and destination `[heads, 1]` point to the first dimension of each head, inside says which heads there are."""
    low_dimension = tl.arange(0, HALF_BLOCK)[None, :]
    rotates = low_dimension < HALF
    low = tl.load(source + low_dimension, mask=inside & rotates, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + low_dimension, mask=inside & rotates, other=0.0).to(tl.float32)
    squares = tl.sum(low * low + high * high, axis=1)
    if REST_BLOCK:
        rest_dimension = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        passes = rest_dimension < H
        rest = tl.load(source + rest_dimension, mask=inside & passes, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, axis=1)
    if NORM:
        scale = tl.rsqrt(squares / H + eps)[:, None]
        low *= scale * tl.load(norm_ptr + low_dimension, mask=rotates, other=0.0).to(tl.float32)
        high *= scale * tl.load(norm_ptr + HALF + low_dimension, mask=rotates, other=0.0).to(tl.float32)
        if REST_BLOCK:
            rest *= scale * tl.load(norm_ptr + rest_dimension, mask=passes, other=0.0).to(tl.float32)
    tl.store(destination + low_dimension, (low * cos - high * sin) * factor, mask=inside & rotates)
    tl.store(destination + HALF + low_dimension, (high * cos + low * sin) * factor, mask=inside & rotates)
    if REST_BLOCK:
        tl.store(destination + rest_dimension, rest * factor, mask=inside & passes)
