"""An engine in this process, driven the way a rank drives it: plans go through their bytes, requests through slots and pages.

What benchmarks and tests share of it, so that both compute what the services compute.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from services.worker.engine.interface import Engine, RankSpec
from shared.protocol.plan import ADMISSION, NO_STOP_ID, Int32s, Plan, decode, encode


def spec(model: Path, **changes: object) -> RankSpec:
    """Of a group of one rank that no supervisor has started, small unless `changes` say otherwise."""
    values: dict[str, object] = {
        "rank": 0,
        "ranks": 1,
        "parent_pid": 0,
        "engine": "torch",
        "model": model,
        "script": None,
        "dtype": "auto",
        "max_model_len": None,
        "page_size": 4,
        "num_pages": 200,
        "kv_cache_memory_bytes": 1 << 30,
        "slots": 8,
        "threads": 1,
        "rendezvous": "",
        "ring_fd": -1,
        "bell_fd": -1,
        "socket_fd": -1,
    }
    return RankSpec(**{**values, **changes})  # type: ignore[arg-type]


def admission(slot: int, max_length: int, **values: Any) -> np.ndarray:
    """One record of a plan: a greedy request unless `values`, fields of ADMISSION, say otherwise."""
    record = np.zeros(1, dtype=ADMISSION)
    record["slot"], record["max_length"], record["top_p"], record["stop_ids"] = slot, max_length, 1.0, NO_STOP_ID
    for name, value in values.items():
        record[name][..., : np.size(value)] = value if np.size(value) > 1 else np.asarray(value).reshape(-1)
    return record


def int32s(*values: int) -> Int32s:
    return np.array(values, dtype=np.int32)


@dataclass
class Driver:
    """Gives every slot its own fixed pages, far apart from their neighbours: `1 + slots * pages_per_slot` in all."""

    engine: Engine
    page_size: int
    pages_per_slot: int
    slots: int = 8
    last_plan: int = field(default=0)

    def execute(self, plan: Plan, iterations: int = 1) -> list[list[int]]:
        """Tokens `[iterations][rows]`."""
        words = np.frombuffer(bytearray(encode(plan)), dtype=np.int32)
        step = self.engine.begin(decode(words.data.cast("B")), words)
        return [step.launch().ids().tolist() for _ in range(iterations)]

    def plan(self, **sections: object) -> Plan:
        """The next one."""
        self.last_plan += 1
        return Plan(self.last_plan, **sections)  # type: ignore[arg-type]

    def prefill(self, slot: int, ids: list[int], chunk: int = 10**6, max_length: int = 10**6, **sampling: object) -> int:
        """Admits a request and prefills it in chunks; returns its first token."""
        limit = min(max_length, self.pages_per_slot * self.page_size)
        pages = np.arange(self.pages_per_slot, dtype=np.int32)
        first: dict[str, object] = {
            "admissions": admission(slot, limit, **sampling),
            "grant_slots": np.full_like(pages, slot),
            "grant_indexes": pages,
            "grant_pages": 1 + slot + self.slots * pages,
        }
        token = -1
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            last = start + chunk >= len(ids)
            rows = {
                "prefill_slots": int32s(slot),
                "prefill_starts": int32s(start),
                "prefill_lengths": int32s(len(part)),
                "prefill_flags": int32s(int(last)),
                "prefill_ids": int32s(*part),
            }
            ((token,),) = self.execute(self.plan(**rows, **first))
            assert last or token == -1
            first = {}
        return token

    def decode(self, *slots: int, iterations: int = 1) -> list[list[int]]:
        """Tokens `[iterations][slots]`."""
        plan = self.plan(decode_slots=int32s(*slots), decode_flags=int32s(*[1] * len(slots)), iterations=iterations)
        return self.execute(plan, iterations)
