from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.noise import (
    GAMMA,
    UNIFORM_BITS,
    UNIFORM_STEP,
    _finalise,
    _hash,
    _signed,
    gumbel,
    gumbel_block,
    gumbel_bound,
    gumbel_of,
    uniform_block,
)
from tests.chi_square import assert_distributed
from tests.kernels.support import DEVICE, INTERPRETED, ON_GPU

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 1234567]
POSITIONS = [0, 1, 2**31 - 1, 77, 5, 131071]
IDS = [0, 1, 2, 151935, 2**31 - 1]


def expected() -> Any:
    def splitmix(state: Any, output: Any) -> Any:
        with np.errstate(over="ignore"):
            z = state + (output + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return z ^ (z >> np.uint64(31))

    def murmur(x: Any) -> Any:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return x ^ (x >> np.uint32(16))

    keys = splitmix(np.array(SEEDS, dtype=np.int64).view(np.uint64), np.array(POSITIONS, dtype=np.uint64))[:, None]
    slope, offset = (keys >> np.uint64(32)).astype(np.uint32) | np.uint32(1), keys.astype(np.uint32)
    bits = murmur(np.array(IDS, dtype=np.uint32) * slope + offset) >> np.uint32(9)
    return -np.log(-np.log((bits.astype(np.float64) + 0.5) * 2.0**-23))


def test_the_stream_is_splitmix64():
    outputs = _finalise(1234567 + (torch.arange(3) + 1) * _signed(GAMMA.value))
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # of the generator, for this seed
    assert [value % 2**64 for value in outputs.tolist()] == published


def test_the_hash_is_the_finaliser_of_murmurhash3():
    published = [0, 0x514E28B7, 0x81F16F39]  # of nothing, 32 bits, with these seeds
    assert _hash(torch.tensor([0, 1, 2**32 - 1])).tolist() == published


def test_matches_float64():
    seeds, positions = torch.tensor(SEEDS, device=DEVICE), torch.tensor(POSITIONS, dtype=torch.int32, device=DEVICE)
    noise = gumbel(seeds, positions, torch.tensor(IDS, device=DEVICE))
    np.testing.assert_allclose(noise.cpu().numpy(), expected(), rtol=1e-5, atol=1e-6)


@triton.jit  # type: ignore[untyped-decorator]
def one_row_each(seeds_ptr, positions_ptr, ids_ptr, out_ptr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    row, index = tl.program_id(0), tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + index, mask=index < COUNT, other=0)
    noise = gumbel_block(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), ids)
    tl.store(out_ptr + row * COUNT + index, noise, mask=index < COUNT)


@pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="needs a GPU or the interpreter")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_the_kernels_draw_the_same():
    seeds, positions = torch.tensor(SEEDS, device=DEVICE), torch.tensor(POSITIONS, dtype=torch.int32, device=DEVICE)
    out = torch.empty(len(SEEDS), len(IDS), device=DEVICE)
    one_row_each[(len(SEEDS),)](seeds, positions, torch.tensor(IDS, dtype=torch.int32, device=DEVICE), out, len(IDS), 8)
    np.testing.assert_allclose(out.cpu().numpy(), expected(), rtol=1e-5, atol=1e-6)


@triton.jit  # type: ignore[untyped-decorator]
def noise_of_each(out_ptr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + number, gumbel_of((number.to(tl.float32) + 0.5) * STEP))


@pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="needs a GPU or the interpreter")
def test_the_noise_of_every_uniform_number_is_near_that_of_float64():
    count, block = 2**UNIFORM_BITS, 2**16
    out = torch.empty(count, device=DEVICE)
    noise_of_each[(count // block,)](out, UNIFORM_STEP.value, block)
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) * UNIFORM_STEP.value
    exact = -(-uniform.log()).log()
    error = (out.cpu().double() - exact).abs() / exact.abs().clamp_min(1)
    assert error.max() < 1.5e-6


@triton.jit  # type: ignore[untyped-decorator]
def bounds_and_noise(bound_ptr, noise_ptr, BLOCK: tl.constexpr):
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed, position = tl.full([], 5, tl.int64), tl.full([], 7, tl.int32)
    tl.store(bound_ptr + ids, gumbel_bound(uniform_block(seed, position, ids)))
    tl.store(noise_ptr + ids, gumbel_block(seed, position, ids))


@pytest.mark.skipif(not (INTERPRETED or ON_GPU), reason="needs a GPU or the interpreter")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_the_bound_is_above_the_noise_and_close_where_it_is_large():
    bound, noise = torch.empty(2, 2**17, device=DEVICE)
    bounds_and_noise[(2**6,)](bound, noise, 2**11)
    above = bound - noise
    assert above.min() > -1e-5
    assert above[noise > 5].max() < 0.07


def test_neighbours_are_independent():
    """Which of 16 x 16 classes the uniform numbers of two ids, positions or seeds fall into."""
    seeds, ids = torch.arange(40), torch.arange(1000)
    noise = torch.stack([gumbel(seeds, torch.full((40,), position, dtype=torch.int32), ids) for position in range(40)])
    classes = (16 * torch.exp(-torch.exp(-noise.double()))).long()  # [position, seed, id]
    for axis, distance in ((0, 1), (1, 1), (2, 1), (2, 2), (2, 256)):
        count = classes.shape[axis] - distance
        pairs = 16 * classes.narrow(axis, 0, count) + classes.narrow(axis, distance, count)
        assert_distributed(pairs.flatten(), torch.full((256,), 1 / 256))


def test_is_standard_gumbel_and_finite():
    noise = gumbel(torch.arange(64), torch.arange(64, dtype=torch.int32), torch.arange(8192))
    assert noise.isfinite().all()
    sigma = (torch.pi**2 / 6 / noise.numel()) ** 0.5
    assert abs(noise.mean().item() - 0.57721566) < 4 * sigma
    assert noise.var().item() == pytest.approx(torch.pi**2 / 6, rel=0.02)


def test_the_largest_uniform_is_below_one():
    largest = (torch.tensor(2.0**UNIFORM_BITS - 1) + 0.5) * UNIFORM_STEP.value
    assert -torch.log(-torch.log(largest)) < torch.inf  # a bit more and one id in 2**24 would win against any logit
