"""What the rank loop asks of an engine, whichever it is. No torch here: some engines do without.

An engine launches an iteration without waiting for it: the rank launches the next one meanwhile, and looks for results in the
order of the launches. An engine that computes in the launch itself has its result at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from services.worker.distributed.rendezvous import CommunicatorKind
from services.worker.distributed.sums import Sums
from services.worker.weights.folder import LoadFormat
from shared.protocol.logprobs import NO_LOGPROBS, Logprobs
from shared.protocol.plan import Int32s, Plan

Progress = Callable[[str, float], None]  # (phase, share of it that is done)
DeviceKind = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class RankSpec:
    """All that a rank is told at its start; travels as JSON on its command line."""

    rank: int
    ranks: int  # on all nodes
    parent_pid: int
    engine: str
    model: Path
    script: Path | None
    dtype: str
    max_model_len: int | None
    page_size: int
    num_pages: int | None
    kv_cache_memory_bytes: int | None
    slots: int
    threads: int
    rendezvous: str
    ring_fd: int
    bell_fd: int
    socket_fd: int
    board_fd: int | None = None
    device: DeviceKind = "auto"
    ranks_per_gpu: int = 1
    memory_fraction: float = 0.9  # of the GPU's, that all its ranks use together
    max_step_tokens: int = 2048
    cuda_graphs: bool = True
    communicator: CommunicatorKind = "auto"
    peer_memory: bool = True
    start_timeout_s: float = 1800.0  # of the ranks' meeting
    step_timeout_s: float = 600.0  # of a collective
    load_format: LoadFormat = "auto"
    sampling_gather: Literal["full", "best", "candidates"] = "best"
    deterministic: bool = False
    profile_folder: Path | None = None
    log_level: str = "info"
    log_format: Literal["console", "json"] = "console"
    nodes: int = 1  # which divide the ranks

    @property
    def local_ranks(self) -> int:
        """Ranks of one node."""
        return self.ranks // self.nodes

    @property
    def local_rank(self) -> int:
        """Which of its node's ranks this is."""
        return self.rank % self.local_ranks


@dataclass(frozen=True)
class Facts:
    """What an engine tells once it is ready; what is compared is the same on every rank."""

    pages: int
    max_length: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    borrowed_shapes: int = field(default=0, compare=False)  # whose tiles were found with another Triton than the one that runs


@dataclass(frozen=True)
class Memory:
    """What a rank holds on its device, in bytes."""

    weights: int
    kv_cache: int


class Flight(Protocol):
    """An iteration that was launched."""

    def landed(self) -> bool:
        """Whether its result is there. Raises what went wrong on the device."""

    def ids(self) -> Int32s:
        """`[rows]`: decode rows, then prefill rows; see NO_TOKEN and FAILED_ROW. Waits until it has landed; asked once, in the order
        of the launches."""

    def logprobs(self) -> Logprobs:
        """Of the rows that want them: of their tokens, and of their prompts' where the plan has them scored. Asked after `ids`."""


@dataclass(frozen=True)
class Landed:
    """The flight of an engine that computes in the launch itself."""

    result: Int32s
    records: Logprobs = field(default_factory=NO_LOGPROBS.copy)

    def landed(self) -> bool:
        return True

    def ids(self) -> Int32s:
        return self.result

    def logprobs(self) -> Logprobs:
        return self.records


class Step(Protocol):
    """A plan that an engine has begun."""

    def launch(self) -> Flight:
        """Begins one iteration; at most LAUNCH_AHEAD have not landed."""


LAUNCH_AHEAD = 2  # iterations; more would delay jumps and cancels


class Engine(Protocol):
    facts: Facts
    memory: Memory
    sums: Sums

    def reset(self) -> None:
        """Forgets every slot."""

    def begin(self, plan: Plan, words: Int32s) -> Step:
        """Applies releases, admissions and grants of a plan; `words` is the whole plan, whose views `plan` holds."""
