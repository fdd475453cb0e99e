"""How decode attention of few rows is cut, for the shapes of models: `python -m benchmarks tune-attention`.

What a layer gains or loses by attention is seen between its neighbours, so the QKV product, the rotation, attention and the output's
product are timed as one chain, the rotation apart and within. The fastest is written to the table of this GPU (`kernels/tuning_*.json`).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.candidates import shape_of
from benchmarks.kernels import PAGE_SIZE, KVCache
from benchmarks.launches import DTYPE, L2_BYTES, Launch, randn, time_launches
from benchmarks.report import Report, Value
from benchmarks.tuning import PROCESSES, RenewedTable, compilers
from kernels.decode_attention import Config, config, decode_attention_triton
from kernels.linear import linear
from kernels.rope import rope_and_store
from kernels.rotated_attention import rotated_attention_triton
from shared.errors import ConfigError

ROWS = (1, 2, 4, 8, 16, 24, 32)
LENGTHS = (1024, 1152)
TURNS, REPLAYS = 3, 10
TILES = ((64, 4, 2), (64, 4, 3), (128, 8, 2), (32, 4, 3))  # positions, warps, stages
MANY_ROWS = 16  # from which other tiles than the first are tried, and shares by number
MAX_POSITIONS = 4096  # of the page table: no more than rows that an entry leaves whole can have
TOLERANCE = 3e-2


class Chain:
    """Attention as it is in a layer, with `copies` of weights and cache, which no cache of the GPU holds together."""

    def __init__(self, hidden: int, q_heads: int, kv_heads: int, head_size: int, rows: int) -> None:
        self.copies = max(2, min(16, L2_BYTES // (rows * 2000 * kv_heads * head_size) + 1))
        self.cache = KVCache(rows, kv_heads, head_size, *LENGTHS, self.copies, MAX_POSITIONS)
        self.counts, self.head_size = [q_heads, kv_heads, kv_heads], head_size
        self.x, self.norm = randn(rows, hidden), randn(head_size)
        self.angles = torch.randn(MAX_POSITIONS, head_size, device="cuda")
        self.qkv = [randn(sum(self.counts) * head_size, hidden) / hidden**0.5 for _ in range(self.copies)]
        self.output = [randn(hidden, q_heads * head_size) / hidden**0.5 for _ in range(self.copies)]
        self.positions, slots = self.cache.lengths - 1, self.cache.slots.long()
        pages = self.cache.page_table[slots, (self.positions // PAGE_SIZE).long()].long()
        self.locations = pages * PAGE_SIZE + self.positions % PAGE_SIZE

    def __call__(self, copy: int, tuned: Config) -> Tensor:
        cache, norms = self.cache, (self.norm, self.norm)
        q, k, v = linear(self.x, self.qkv[copy]).view(len(self.x), -1, self.head_size).split(self.counts, dim=1)
        places = self.positions, self.angles, self.locations[copy], cache.k, cache.v
        read = cache.page_table, cache.slots[copy], cache.lengths, self.head_size**-0.5
        if tuned.rotates:
            y = rotated_attention_triton(q, k, v, *places, *read, None, *norms, tuned=tuned)
        else:
            y = decode_attention_triton(rope_and_store(q, k, v, *places, *norms), cache.k, cache.v, *read, tuned=tuned)
        return linear(y.flatten(1), self.output[copy])

    def us(self, tuned: Config) -> float:
        launches: list[Launch] = [partial(self, copy, tuned) for copy in range(self.copies)]
        return time_launches(launches, REPLAYS).median_us


def tune_attention(models: Sequence[str], rows: Sequence[int], out: Path) -> Report:
    """Needs a GPU. Raises ConfigError without one."""
    if not torch.cuda.is_available():
        raise ConfigError("attention is tuned on a GPU, and none is here")
    with compilers() as pool:
        list(pool.map(partial(_compile_some, tuple(models), tuple(rows)), range(PROCESSES)))
    renewed, device, lines = RenewedTable(out), torch.device("cuda", 0), list[Sequence[Value]]()
    for model, count in product(models, rows):
        shape = shape_of(model)
        heads = shape.heads, shape.kv_heads, shape.head_dim
        chain, before = Chain(shape.hidden_size, *heads, count), config(device, DTYPE, count, *heads, MAX_POSITIONS)
        tried = [each for each in dict.fromkeys([before, *_candidates(count, before)]) if _fits(chain, each, before)]
        turns = [[chain.us(each) for each in tried] for _ in range(TURNS)]
        times = [min(each) for each in zip(*turns, strict=True)]
        best = tried[times.index(min(times))]
        renewed.put("decode_attention", "x".join(map(str, heads)), count, [*best])
        print(f"{model} M={count}: {times[0]:.1f} us by {[*before]}, {min(times):.1f} by {[*best]}", flush=True)
        lines.append((model, count, times[0], str([*before]), min(times), str([*best])))
        renewed.write()
    return Report(
        name="tune-attention",
        columns=("model", "rows", "before us", "configuration", "us", "configuration now"),
        rows=lines,
        notes=(f"the table is in {renewed.path}: copy it to kernels/",),
    )


def _candidates(rows: int, before: Config) -> Iterator[Config]:
    """The rules' shares with more and fewer tiles at least, so that long rows are cut in more; of many rows one to three shares."""
    for least, rotates in product((2, 3, 4, 5, 6), (0, 1)):
        yield Config(*TILES[0], before.splits, least, rotates)
    if rows >= MANY_ROWS:
        for tiles, splits, rotates in product(TILES, (1, 2, 3), (0, 1)):
            yield Config(*tiles, splits, 2, rotates)


def _fits(chain: Chain, tuned: Config, before: Config) -> bool:
    """Whether it runs; one that computes something else than what was there before is told of and left out."""
    try:
        y = chain(0, tuned)
    except OutOfResources:
        return False
    right = torch.allclose(y, chain(0, before), rtol=TOLERANCE, atol=TOLERANCE)
    if not right:
        print(f"WRONG: {tuned} of {len(y)} rows", flush=True)
    return right


def _compile_some(models: Sequence[str], rows: Sequence[int], first: int) -> None:
    """Every PROCESSES-th kernel from `first` on, into the cache that all processes share."""
    kernels = [(model, tiles, splits, rotates) for model in models for tiles in TILES for splits in (1, 2, 3) for rotates in (0, 1)]
    for model, tiles, splits, rotates in kernels[first::PROCESSES]:
        shape = shape_of(model)
        tuned = Config(*tiles, splits, 2, rotates)
        _fits(Chain(shape.hidden_size, shape.heads, shape.kv_heads, shape.head_dim, rows[0]), tuned, tuned)
