"""What the rank loop asks of an engine, whichever it is. No torch here: some engines do without."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from services.worker.distributed.rendezvous import CommunicatorKind
from services.worker.weights.folder import LoadFormat
from shared.protocol.plan import Int32s, Plan

Progress = Callable[[str, float], None]  # (phase, share of it that is done)


@dataclass(frozen=True)
class RankSpec:
    """All that a rank is told at its start; travels as JSON on its command line."""

    rank: int
    ranks: int
    parent_pid: int
    engine: str
    model: Path
    script: Path | None
    dtype: str
    max_model_len: int | None
    page_size: int
    num_pages: int | None
    kv_cache_memory_bytes: int
    slots: int
    threads: int
    rendezvous: str
    ring_fd: int
    bell_fd: int
    socket_fd: int
    board_fd: int | None = None
    communicator: CommunicatorKind = "auto"
    start_timeout_s: float = 1800.0  # of the ranks' meeting
    step_timeout_s: float = 600.0  # of a collective
    load_format: LoadFormat = "auto"
    sampling_gather: Literal["full", "candidates"] = "full"
    deterministic: bool = False
    log_level: str = "info"


@dataclass(frozen=True)
class Facts:
    """What an engine tells once it is ready; the same on every rank."""

    pages: int
    max_length: int
    vocab_size: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True)
class Memory:
    """What a rank holds on its device, in bytes."""

    weights: int
    kv_cache: int


class Step(Protocol):
    """A plan that an engine has begun."""

    def run(self) -> Int32s:
        """One iteration -> ids `[rows]`: decode rows, then prefill rows; see NO_TOKEN and FAILED_ROW."""


class Engine(Protocol):
    facts: Facts
    memory: Memory

    def reset(self) -> None:
        """Forgets every slot."""

    def begin(self, plan: Plan, words: Int32s) -> Step:
        """Applies releases, admissions and grants of a plan; `words` is the whole plan, whose views `plan` holds."""
