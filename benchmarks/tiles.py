"""Times tile configurations of attention: `python -m benchmarks tiles`.

Their configurations stand in the kernels, by shape of head and shares of a row: this prints what each candidate takes, so that a person
can put the best there. A candidate that does not fit the GPU is left out.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.kernels import PAGE_SIZE, KVCache
from benchmarks.launches import L2_BYTES, Launch, randn, time_launches
from benchmarks.report import Report, Value
from benchmarks.tuning import PROCESSES, compilers
from kernels import decode_attention, prefill_attention
from kernels.decode_attention import decode_attention_triton
from kernels.linear import linear
from kernels.prefill_attention import prefill_attention_triton
from kernels.prefill_attention_hopper import HopperConfig, is_served, prefill_attention_hopper
from kernels.rope import rope_and_store
from shared.errors import ConfigError

REPLAYS = 5
FASTEST = 4  # of a case, that are shown
PREFILLS = ((16, 8, 1, 8192), (16, 8, 16, 1024), (40, 8, 1, 8192), (40, 8, 16, 1024), (32, 8, 64, 256))  # heads, rows, length
DECODES = ((16, 8, 1024), (32, 8, 4096), (40, 8, 5120))  # heads, hidden size
DECODE_SPLITS = {1: (8, 16, 32), 4: (8, 16), 8: (4, 6, 8), 16: (2, 3, 4), 32: (1, 2), 64: (1, 2), 256: (1,)}  # by rows
DECODE_LENGTHS = (1024, 1152)
DECODE_CONFIGS = tuple(
    decode_attention.Config(*each)
    for each in ((32, 2, 3), (32, 2, 4), (32, 4, 4), (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 3), (128, 8, 3))
)
PREFILL_CONFIGS = tuple(
    prefill_attention.Config(*each) for each in ((64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3), (256, 64, 8, 3))
)
HOPPER_CONFIGS = tuple(HopperConfig(*each) for each in ((2, 64, 4), (2, 128, 2), (3, 64, 2), (3, 64, 3)))


class Candidate(NamedTuple):
    operation: str
    case: str
    config: str
    launches: list[Launch]
    operations: float  # of one launch
    element_bytes: float  # that it reads at least


def _prefills() -> Iterator[Candidate]:
    for q_heads, kv_heads, rows, length in PREFILLS:
        cache, q = KVCache(rows, kv_heads, 128, length, length, copies=1), randn(rows * length, q_heads, 128)
        starts = torch.arange(0, rows * length + 1, length, device="cuda", dtype=torch.int32)
        rest = (cache.slots[0], starts, cache.lengths, length, 128**-0.5)
        work = 4.0 * q_heads * 128 * rows * length * (length + 1) / 2
        inputs, case = (q, cache.k, cache.v, cache.page_table, *rest), f"{rows} x {length}, {q_heads} / {kv_heads}"
        for tuned in PREFILL_CONFIGS:
            launch: Launch = partial(prefill_attention_triton, *inputs, tuned=tuned)
            yield Candidate("prefill_attention", case, str([*tuned]), [launch], work, 0.0)
        for config in HOPPER_CONFIGS if is_served(q, cache.k) else ():
            launch = partial(prefill_attention_hopper, *inputs, tuned=config)
            yield Candidate("prefill_attention", case, f"Hopper {[*config]}", [launch], work, 0.0)


class Neighbours:
    """Decode attention as it is in a layer: behind the QKV product and the rotation, before the output's product.

    Alone, behind itself, other configurations win: there it shares multiprocessors with nobody.
    """

    def __init__(self, q_heads: int, kv_heads: int, hidden: int, cache: KVCache, slots: Tensor) -> None:
        self.cache, self.slots, self.counts = cache, slots, [q_heads, kv_heads, kv_heads]
        self.x, self.norm, self.table = randn(len(slots[0]), hidden), randn(128), torch.randn(8192, 128, device="cuda")
        copies = range(len(slots))
        self.qkv = [randn(sum(self.counts) * 128, hidden) / hidden**0.5 for _ in copies]
        self.output = [randn(hidden, q_heads * 128) / hidden**0.5 for _ in copies]
        self.positions = cache.lengths - 1
        pages = cache.page_table[slots.long(), (self.positions // PAGE_SIZE).long()].long()
        self.locations = pages * PAGE_SIZE + self.positions % PAGE_SIZE

    def __call__(self, copy: int, tuned: decode_attention.Config, splits: int) -> Tensor:
        cache, norm = self.cache, self.norm
        q, k, v = linear(self.x, self.qkv[copy]).view(len(self.x), -1, 128).split(self.counts, dim=1)
        q = rope_and_store(q, k, v, self.positions, self.table, self.locations[copy], cache.k, cache.v, norm, norm)
        shared = cache.page_table, self.slots[copy], cache.lengths, 128**-0.5
        y = decode_attention_triton(q, cache.k, cache.v, *shared, splits=splits, tuned=tuned)
        return linear(y.flatten(1), self.output[copy])


def _decodes() -> Iterator[Candidate]:
    """Few rows cut into as many shares as the kernel chooses, and into more and fewer; many rows whole."""
    for q_heads, kv_heads, hidden in DECODES:
        for rows, splits in DECODE_SPLITS.items():
            copies = max(2, min(16, L2_BYTES // (rows * 2000 * kv_heads * 128) + 1))
            cache = KVCache(rows, kv_heads, 128, *DECODE_LENGTHS, copies)
            layers = Neighbours(q_heads, kv_heads, hidden, cache, cache.slots)
            element_bytes = 4.0 * cache.total_tokens * kv_heads * 128 + layers.qkv[0].nbytes + layers.output[0].nbytes
            for tuned, shares in product(DECODE_CONFIGS, splits):
                launches: list[Launch] = [partial(layers, copy, tuned, shares) for copy in range(copies)]
                case = f"{rows} rows, {q_heads} / {kv_heads}"
                yield Candidate("decode_attention", case, f"{[*tuned]} {shares}", launches, 0.0, element_bytes)


KINDS: dict[str, Callable[[], Iterator[Candidate]]] = {
    "decode_attention": _decodes,
    "prefill_attention": _prefills,
}


def _fits(candidate: Candidate) -> bool:
    try:
        y = candidate.launches[0]()
    except OutOfResources:
        return False
    assert isinstance(y, Tensor)
    return True


def compile_some(operation: str, first: int) -> None:
    """Every PROCESSES-th candidate from `first` on, into the cache that all processes share."""
    for number, candidate in enumerate(KINDS[operation]()):
        if number % PROCESSES == first:
            _fits(candidate)


def tiles(operations: Sequence[str]) -> Report:
    """Of these operations, or of all; fastest first. Needs a GPU. Raises ConfigError for an operation that is none."""
    unknown = set(operations) - KINDS.keys()
    if unknown or not torch.cuda.is_available():
        raise ConfigError(f"no operation: {', '.join(sorted(unknown))}" if unknown else "tiles are measured on a GPU, and none is here")
    lines: list[Sequence[Value]] = []
    for name in operations or KINDS:
        with compilers() as pool:
            list(pool.map(partial(compile_some, name), range(PROCESSES)))
        times: dict[str, list[tuple[float, Candidate]]] = {}
        for candidate in KINDS[name]():
            if _fits(candidate):
                times.setdefault(candidate.case, []).append((time_launches(candidate.launches, REPLAYS).median_us, candidate))
        for case, found in times.items():
            for us, candidate in sorted(found, key=lambda each: each[0])[:FASTEST]:
                rates = candidate.operations / us / 1e6, candidate.element_bytes / us / 1e6
                lines.append((name, case, us, *rates, candidate.config))
    return Report(
        name="tiles",
        columns=("operation", "case", "us", "TFLOP/s", "TB/s", "configuration"),
        rows=lines,
        notes=(f"the fastest {FASTEST} of each case; query heads and KV heads of 128 after the comma",),
    )
