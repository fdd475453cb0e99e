"""Times tile configurations of prefill attention: `python -m benchmarks tiles`.

They stand in the kernels, by shape of head: this prints what each candidate takes, so that a person can put the best there. A candidate
that does not fit the GPU is left out.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.kernels import KVCache
from benchmarks.launches import Launch, randn, time_launches
from benchmarks.report import Report, Value
from benchmarks.tuning import PROCESSES, compilers
from kernels import prefill_attention
from kernels.prefill_attention import prefill_attention_triton
from kernels.prefill_attention_hopper import HopperConfig, is_served, prefill_attention_hopper
from shared.errors import ConfigError

REPLAYS = 5
FASTEST = 4  # of a case, that are shown
PREFILLS = ((16, 8, 1, 8192), (16, 8, 16, 1024), (40, 8, 1, 8192), (40, 8, 16, 1024), (32, 8, 64, 256))  # heads, rows, length
PREFILL_CONFIGS = tuple(
    prefill_attention.Config(*each) for each in ((64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3), (256, 64, 8, 3))
)
HOPPER_CONFIGS = tuple(HopperConfig(*each) for each in ((2, 64, 4), (2, 128, 2), (3, 64, 2), (3, 64, 3)))


class Candidate(NamedTuple):
    case: str
    config: str
    launch: Launch
    operations: float  # of one launch


def _candidates() -> Iterator[Candidate]:
    for q_heads, kv_heads, rows, length in PREFILLS:
        cache, q = KVCache(rows, kv_heads, 128, length, length, copies=1), randn(rows * length, q_heads, 128)
        starts = torch.arange(0, rows * length + 1, length, device="cuda", dtype=torch.int32)
        rest = (cache.slots[0], starts, cache.lengths, length, 128**-0.5)
        work = 4.0 * q_heads * 128 * rows * length * (length + 1) / 2
        inputs, case = (q, cache.k, cache.v, cache.page_table, *rest), f"{rows} x {length}, {q_heads} / {kv_heads}"
        for tuned in PREFILL_CONFIGS:
            yield Candidate(case, str([*tuned]), partial(prefill_attention_triton, *inputs, tuned=tuned), work)
        for config in HOPPER_CONFIGS if is_served(q, cache.k) else ():
            yield Candidate(case, f"Hopper {[*config]}", partial(prefill_attention_hopper, *inputs, tuned=config), work)


def _fits(candidate: Candidate) -> bool:
    try:
        y = candidate.launch()
    except OutOfResources:
        return False
    assert isinstance(y, Tensor)
    return True


def compile_some(first: int) -> None:
    """Every PROCESSES-th candidate from `first` on, into the cache that all processes share."""
    for number, candidate in enumerate(_candidates()):
        if number % PROCESSES == first:
            _fits(candidate)


def tiles() -> Report:
    """Fastest first. Needs a GPU. Raises ConfigError without one."""
    if not torch.cuda.is_available():
        raise ConfigError("tiles are measured on a GPU, and none is here")
    with compilers() as pool:
        list(pool.map(compile_some, range(PROCESSES)))
    times: dict[str, list[tuple[float, Candidate]]] = {}
    for candidate in _candidates():
        if _fits(candidate):
            times.setdefault(candidate.case, []).append((time_launches([candidate.launch], REPLAYS).median_us, candidate))
    lines: list[Sequence[Value]] = []
    for case, found in times.items():
        for us, candidate in sorted(found, key=lambda each: each[0])[:FASTEST]:
            lines.append((case, us, candidate.operations / us / 1e6, candidate.config))
    return Report(
        name="tiles",
        columns=("case", "us", "TFLOP/s", "configuration"),
        rows=lines,
        notes=(f"the fastest {FASTEST} of each case; query heads and KV heads of 128 after the comma",),
    )
