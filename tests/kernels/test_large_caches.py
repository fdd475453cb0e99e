"""Caches of more than 2**31 elements: the kernels that write and read them address with 64 bits. Decode attention's is beside its tests."""

import pytest
import torch
from torch import Tensor

from kernels.prefill_attention import prefill_attention_triton
from kernels.rope import rope_and_store_triton
from kernels.rotated_attention import rotated_attention_triton
from tests.kernels.paged import attention
from tests.kernels.support import DEVICE, ON_GPU, assert_near, randn

pytestmark = pytest.mark.skipif(not ON_GPU, reason="takes some gigabytes of a GPU's memory")
PAGE_SIZE, KV_HEADS, HEAD_SIZE, LAST = 16, 8, 128, 8  # LAST: pages at the end, the first of them beyond the 2**31
PAGES = 2**31 // (PAGE_SIZE * KV_HEADS * HEAD_SIZE) + LAST


def caches() -> tuple[Tensor, Tensor]:
    k, v = (torch.zeros(PAGES, PAGE_SIZE, KV_HEADS, HEAD_SIZE, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    return k, v


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_prefill_attention_reads_them() -> None:
    (k_cache, v_cache), tokens = caches(), 100
    k_cache[-LAST:], v_cache[-LAST:] = randn(2, LAST, PAGE_SIZE, KV_HEADS, HEAD_SIZE, seed=1, dtype=torch.bfloat16)
    table = torch.arange(PAGES - LAST, PAGES, dtype=torch.int32, device=DEVICE)[None]
    q = randn(tokens, 16, HEAD_SIZE, seed=2, dtype=torch.bfloat16)
    out = prefill_attention_triton(q, k_cache, v_cache, table, int32(0), int32(0, tokens), int32(tokens), tokens, 0.1)
    k, v = (cache[-LAST:].flatten(0, 1)[:tokens].double() for cache in (k_cache, v_cache))
    assert_near(out, attention(q, k, v, 0.1, None), ulps=2)


def test_one_operation_stores_and_reads_in_them() -> None:
    (k_cache, v_cache), length = caches(), 100
    k_cache[-LAST:], v_cache[-LAST:] = randn(2, LAST, PAGE_SIZE, KV_HEADS, HEAD_SIZE, seed=1, dtype=torch.bfloat16)
    pages = torch.arange(PAGES - LAST, PAGES, dtype=torch.int32, device=DEVICE)[None]
    q, k, v = randn(1, 32, HEAD_SIZE, seed=2, dtype=torch.bfloat16).split([16, KV_HEADS, KV_HEADS], dim=1)
    table = torch.cat((torch.ones(1, HEAD_SIZE // 2), torch.zeros(1, HEAD_SIZE // 2)), dim=1).to(DEVICE)  # turns nothing
    location = torch.tensor([(PAGES - LAST) * PAGE_SIZE + length - 1], device=DEVICE)
    places = int32(0), table, location, k_cache, v_cache
    out = rotated_attention_triton(q, k, v, *places, pages, int32(0), int32(length), 0.1)
    keys, values = (cache[-LAST:].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
    assert keys[-1].equal(k[0])
    assert values[-1].equal(v[0])
    assert_near(out, attention(q, keys.double(), values.double(), 0.1, None), ulps=2)


def test_keys_and_values_are_stored_in_them() -> None:
    (k_cache, v_cache), tokens = caches(), 5
    qkv = randn(tokens, 16 + 2 * KV_HEADS, HEAD_SIZE, seed=1, dtype=torch.bfloat16)
    q, k, v = qkv.split([16, KV_HEADS, KV_HEADS], dim=1)
    table = torch.cat((torch.ones(1, HEAD_SIZE // 2), torch.zeros(1, HEAD_SIZE // 2)), dim=1).to(DEVICE)  # turns nothing
    locations = PAGES * PAGE_SIZE - 1 - torch.arange(tokens, device=DEVICE)
    rope_and_store_triton(q, k, v, int32(*[0] * tokens), table, locations, k_cache, v_cache)
    for cache, stored in ((k_cache, k), (v_cache, v)):
        assert cache.flatten(0, 1)[locations].equal(stored)
        assert int(cache[:LAST].count_nonzero()) == 0
