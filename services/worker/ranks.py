"""The ranks of a node: one process each. They read the node's ring, and say through a socket each what came of it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from services.worker import cpus
from services.worker.distributed.board import Board, Standing
from services.worker.distributed.rendezvous import Rendezvous
from services.worker.engine.interface import RankSpec
from services.worker.messages import MAX_PACKET_BYTES, Ended, Failed, Message, decode, socket_pair
from services.worker.rank import spec_to_json
from services.worker.ring import Kind, RingWriter, create_ring
from services.worker.settings import DEADLINE_FACTOR, WorkerSettings
from shared.errors import ConfigError, LockstepError

# Of ranks, where the user has not set it otherwise. Threads that wait by spinning take the CPU from the threads that they wait for,
# when there are more processes than CPUs: a token of the demo model then took 675 ms instead of 160 (2 shared cores, 2 threads).
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
ON_ONE_NODE = {"GLOO_SOCKET_IFNAME": "lo"}  # over nodes gloo takes the address that the host's name has

Tell = Callable[[int, Message], None]  # (rank, what it says)


class GroupFailed(LockstepError):
    """A rank died, broke or stalled, or a node went away: the group ends."""


def fault(name: str, message: Failed | Ended) -> LockstepError:
    """What a rank's end means for its group. name: the rank's."""
    match message:
        case Failed(cause, config=True):
            return ConfigError(cause)
        case Failed(cause):
            return GroupFailed(f"rank {name}: {cause}")
        case Ended(how):
            return GroupFailed(f"rank {name} ended {how}")


class Ranks(Protocol):
    """Ranks of a group, as its supervisor sees them: those of its own node, of another one, or simulated ones."""

    @property
    def numbers(self) -> range: ...

    def write(self, kind: Kind, plan: int, payload: bytes = b"") -> None:
        """An entry of the ring, for all of them. Raises RingFull, having written nothing, when those of this node are behind."""

    def standings(self) -> Sequence[Standing]:
        """Where each is, as far as it is known; callable from any thread."""

    def print_stacks(self) -> None:
        """Into the log of their node."""

    def stop(self) -> None:
        """They are not needed any more, and say nothing any more."""


class LocalRanks:
    """Processes of this node, started at once."""

    def __init__(self, settings: WorkerSettings, tell: Tell) -> None:
        self._tell = tell
        self._scratch = tempfile.TemporaryDirectory(prefix="lockstep-")
        place = _rendezvous(settings, Path(self._scratch.name))
        self.numbers = place.ranks
        self._board = Board(settings.tensor_parallel_size)
        ring, bells = create_ring(), [os.eventfd(0) for _ in self.numbers]
        self._ring = RingWriter(ring, bells)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._links: dict[int, socket.socket] = {}
        for rank, bell in zip(self.numbers, bells, strict=True):
            ours, theirs = socket_pair()
            spec = _spec(settings, rank, place.url, ring, bell, theirs.fileno(), self._board.descriptor)
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "services.worker.rank", spec_to_json(spec)],
                pass_fds=(ring, bell, theirs.fileno(), self._board.descriptor),
                env={**ENVIRONMENT, **(ON_ONE_NODE if settings.nodes == 1 else {}), **os.environ},
            )
            theirs.close()
            ours.setblocking(False)
            self._links[rank] = ours
            asyncio.get_running_loop().add_reader(ours.fileno(), self._on_readable, rank)

    @property
    def pids(self) -> dict[int, int]:
        """By rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    @property
    def gathered_rows(self) -> int:
        """As rank 0, which is one of these, has counted them."""
        return self._board.gathered_rows

    @property
    def replayed_iterations(self) -> int:
        """Of rank 0."""
        return self._board.replayed_iterations

    def write(self, kind: Kind, plan: int, payload: bytes = b"") -> None:
        self._ring.write(kind, plan, payload)

    def standings(self) -> list[Standing]:
        return self._board.standings(self.pids)

    def print_stacks(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGUSR1)

    def stop(self) -> None:
        """Kills and reaps all: afterwards their devices are free."""
        for rank, process in self._processes.items():
            asyncio.get_running_loop().remove_reader(self._links[rank].fileno())
            process.kill()
        for rank, process in self._processes.items():
            process.wait()
            self._links[rank].close()
        self._scratch.cleanup()

    def _on_readable(self, rank: int) -> None:
        while True:
            try:
                packet = self._links[rank].recv(MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._tell(rank, Failed(str(error), config=False))
                packet = b""
            if not packet:
                asyncio.get_running_loop().remove_reader(self._links[rank].fileno())
                self._tell(rank, Ended(_how(self._processes[rank])))
                return
            self._tell(rank, decode(packet))


def _rendezvous(settings: WorkerSettings, scratch: Path) -> Rendezvous:
    ranks, nodes = settings.tensor_parallel_size, settings.nodes
    if nodes == 1:
        return Rendezvous.on_one_node(ranks, scratch)
    assert settings.leader_address is not None, "settings demand it"
    return Rendezvous.over_nodes(ranks, nodes, settings.node_index, settings.leader_address, settings.leader_port)


def _spec(settings: WorkerSettings, rank: int, rendezvous: str, ring: int, bell: int, link: int, board: int) -> RankSpec:
    """ring, bell, link, board: descriptors that the rank inherits."""
    ranks, nodes = settings.tensor_parallel_size, settings.nodes
    return RankSpec(
        rank=rank,
        ranks=ranks,
        nodes=nodes,
        parent_pid=os.getpid(),
        engine=settings.engine,
        model=settings.model,
        script=settings.script,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        page_size=settings.page_size,
        num_pages=settings.num_pages,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
        slots=settings.max_num_seqs,
        threads=settings.threads or max(1, cpus.available() * nodes // ranks),
        rendezvous=rendezvous,
        ring_fd=ring,
        bell_fd=bell,
        socket_fd=link,
        board_fd=board,
        device=settings.device,
        ranks_per_gpu=settings.ranks_per_gpu,
        memory_fraction=settings.memory_fraction,
        max_step_tokens=settings.max_step_tokens,
        cuda_graphs=settings.cuda_graphs,
        communicator=settings.communicator,
        peer_memory=settings.peer_memory,
        start_timeout_s=settings.start_deadline_s,
        step_timeout_s=DEADLINE_FACTOR * settings.step_deadline_s,
        load_format=settings.load_format,
        sampling_gather=settings.sampling_gather,
        deterministic=settings.deterministic,
        profile_folder=settings.profile_folder,
        log_level=settings.log_level,
        log_format=settings.log_format,
    )


def _how(process: subprocess.Popen[bytes]) -> str:
    """A process ended; its socket closes a moment before."""
    try:
        status = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return "its connection"
    return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
