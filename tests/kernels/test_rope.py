import pytest
import torch
from torch import Tensor

from kernels.rope import rope_and_store, rope_and_store_torch, rope_and_store_triton
from tests.kernels.support import DEVICE, DTYPES, ON_GPU, assert_near, implementations, randn

EPS = 1e-5
PAGES, PAGE_SIZE, TABLE_LENGTH = 5, 16, 50


def rotated(x: Tensor, norm: Tensor | None, table: Tensor, positions: Tensor) -> Tensor:
    x = x.double()
    if norm is not None:
        x = x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * norm.double()
    half = table.shape[1] // 2
    turn = torch.complex(*table.double()[positions.long()][:, None].chunk(2, dim=-1))
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)


@pytest.mark.parametrize("implementation", implementations(rope_and_store_torch, rope_and_store_triton))
@pytest.mark.parametrize(
    "tokens, q_heads, kv_heads, head_size, rotated_size",
    [
        (0, 4, 2, 64, 64),
        (1, 9, 3, 64, 64),
        (3, 14, 2, 64, 32),
        (5, 4, 4, 80, 80),
        (2, 7, 1, 96, 72),
        (6, 16, 8, 128, 128),
        (2, 3, 3, 256, 64),
    ],
)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64(implementation, tokens, q_heads, kv_heads, head_size, rotated_size, normed, dtype):
    qkv = randn(tokens, q_heads + 2 * kv_heads, head_size, seed=head_size, dtype=dtype)
    q, k, v = qkv.split([q_heads, kv_heads, kv_heads], dim=1)  # strided, as the layer gives them
    norms = (randn(head_size, seed=1, dtype=dtype), randn(head_size, seed=2, dtype=dtype)) if normed else (None, None)
    table = randn(TABLE_LENGTH, rotated_size, seed=3)
    positions = torch.arange(tokens, dtype=torch.int32, device=DEVICE) * 11 % TABLE_LENGTH
    locations = torch.arange(tokens, device=DEVICE) * 37 % (PAGES * PAGE_SIZE)
    k_cache, v_cache = torch.full((2, PAGES, PAGE_SIZE, kv_heads, head_size), 7.0, dtype=dtype, device=DEVICE)

    query_scale = None if normed else 1 + randn(TABLE_LENGTH, seed=4).abs()
    out = implementation(q, k, v, positions, table, locations, k_cache, v_cache, *norms, EPS, query_scale)

    assert out.is_contiguous()
    factor = 1.0 if query_scale is None else query_scale.double()[positions.long()][:, None, None]
    assert_near(out, rotated(q, norms[0], table, positions) * factor, ulps=2, floor=1e-5)
    k_flat, v_flat = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    assert_near(k_flat[locations], rotated(k, norms[1], table, positions), ulps=2, floor=1e-5)
    assert v_flat[locations].equal(v)
    others = torch.ones(len(k_flat), dtype=torch.bool, device=DEVICE).index_fill_(0, locations, False)
    assert (k_flat[others] == 7).all()
    assert (v_flat[others] == 7).all()


@pytest.mark.parametrize("implementation", implementations(rope_and_store_torch, rope_and_store_triton))
def test_many_tokens_at_once(implementation):
    tokens, table = 600 if ON_GPU else 40, randn(TABLE_LENGTH, 64, seed=1)  # enough that a program takes several heads
    q, k, v = randn(tokens, 3, 64, seed=2), randn(tokens, 1, 64, seed=3), randn(tokens, 1, 64, seed=4)
    positions, locations = torch.arange(tokens, dtype=torch.int32, device=DEVICE) % TABLE_LENGTH, torch.arange(tokens, device=DEVICE)
    k_cache, v_cache = torch.zeros(2, 40, PAGE_SIZE, 1, 64, device=DEVICE)
    out = implementation(q, k, v, positions, table, locations, k_cache, v_cache)
    assert_near(out, rotated(q, None, table, positions), ulps=2, floor=1e-5)
    assert v_cache.flatten(0, 1)[:tokens].equal(v)


def test_refuses_scattered_dimensions():
    x, cache = torch.zeros(2, 4, 3, device=DEVICE).transpose(1, 2), torch.zeros(1, 16, 3, 4, device=DEVICE)
    positions = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="last dimension of q, k and v"):
        rope_and_store(x, x, x, positions, torch.zeros(1, 4, device=DEVICE), positions.long(), cache, cache)
