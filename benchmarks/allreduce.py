"""Sums over the GPUs of one host: ours, by way and size, against NCCL's in the same run, in CUDA graphs.

A graph holds LAUNCHES sums one after the other, as a decode step does; the time of a replay, by their number, is what one takes. All graphs
of a size are replayed in turns, so that what changes with time (clocks, the other rank's host) is the same for all of them.
"""

import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.report import Plot, Report, Series, Value
from kernels.all_reduce import Way, all_reduce, all_reduce_add_rms_norm, fits, norm_is_fused
from kernels.rms_norm import add_rms_norm
from services.worker.distributed.collectives import Collectives
from services.worker.distributed.peer_memory import PeerMemoryCommunicator, meet
from services.worker.distributed.preflight import check, part
from services.worker.distributed.pynccl import NcclCommunicator
from services.worker.distributed.torch_group import ControlGroup, TorchCommunicator
from shared.errors import ConfigError, LockstepError
from shared.process import die_with_parent

POWERS = tuple(1 << power for power in range(11, 27))
SIZES = tuple(sorted((*POWERS, 3 << 17, 5 << 19, 5 << 25)))  # bytes: also a limit of WAYS, and 256 and 16,384 rows of HIDDEN
HIDDEN = 5120  # of the lines with a norm: Qwen3-14B's and 32B's
ROWS = (1, 2, 4, 8, 16, 24, 32, 64)
EPS = 1e-6
LAUNCHES = 40  # of one graph
ROUNDS, REPLAYS = 6, 10  # of all graphs in turns, and of each of them in its turn
DEADLINE_S = 300.0
DTYPE = torch.bfloat16
LIBRARIES = ("nccl", "pynccl")
COLUMNS = ("KiB", *(f"{name} us" for name in LIBRARIES), *(f"{way.value} us" for way in Way), "ours us", "ours / nccl", "bus GB/s")
NORM_COLUMNS = ("rows", "KiB", "nccl, norm us", "ours, norm us", "fused us", "chosen", "chosen / nccl")

Times = dict[str, float]  # microseconds by column


class RankFailed(LockstepError):
    """A rank of the benchmark broke; it has told how."""


def allreduce(ranks: int, sizes: Sequence[int] = SIZES) -> list[Report]:
    """Two reports: of sums, and of sums with the residual and norm that follow. Raises ConfigError without so many GPUs."""
    if ranks < 2 or torch.cuda.device_count() < ranks:
        raise ConfigError(f"ranks: {ranks}, each on a GPU of its own and 2 at least; this machine has {torch.cuda.device_count()}")
    context = multiprocessing.get_context("spawn")
    links, processes = [], []
    with tempfile.TemporaryDirectory(prefix="lockstep-allreduce-") as folder:
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            rendezvous = f"file://{Path(folder) / 'rendezvous'}"
            process = context.Process(target=_serve, args=(rank, ranks, rendezvous, tuple(sizes), theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            links.append(ours)
            processes.append(process)
        try:
            answers = [_answer(rank, link) for rank, link in enumerate(links)]
        finally:
            for process in processes:
                process.kill()
                process.join()
    sums, norms = answers[0]
    return [sums_report(ranks, sums), _norms_report(ranks, norms)]


def _answer(rank: int, link: Connection) -> tuple[dict[int, Times], dict[int, Times]]:
    try:
        if link.poll(DEADLINE_S):
            answer: tuple[dict[int, Times], dict[int, Times]] | str = link.recv()
            if not isinstance(answer, str):
                return answer
            raise RankFailed(f"rank {rank}: {answer}")
    except EOFError:
        raise RankFailed(f"rank {rank} has ended") from None
    raise RankFailed(f"rank {rank} did not answer within {DEADLINE_S:g} s")


def _serve(rank: int, ranks: int, rendezvous: str, sizes: tuple[int, ...], link: Connection, parent: int) -> None:
    die_with_parent(parent, signal.SIGKILL)  # also in the middle of a launch that waits for ever
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    try:
        with torch.inference_mode():
            link.send(_measured(ControlGroup(rank, ranks, rendezvous, DEADLINE_S), device, sizes))
    except Exception:  # the edge of the process
        link.send(traceback.format_exc())
    link.poll(DEADLINE_S)  # the others may still use this rank's memory


def _measured(control: ControlGroup, device: torch.device, sizes: Sequence[int]) -> tuple[dict[int, Times], dict[int, Times]]:
    """Times of sums by their bytes, and of sums and norms by their rows."""
    libraries: dict[str, Collectives] = {
        "nccl": TorchCommunicator(control, device, DEADLINE_S),
        "pynccl": NcclCommunicator(control, device),
    }
    peers = meet(control, device)
    ours = PeerMemoryCommunicator(libraries["nccl"], peers)
    sums: dict[int, Times] = {}
    for size in sizes:
        x = torch.zeros(size // DTYPE.itemsize, dtype=DTYPE, device=device)
        ways: dict[str, Callable[[Tensor], Tensor]] = {name: group.all_reduce for name, group in libraries.items()}
        ways |= {way.value: partial(all_reduce, peers=peers, way=way) for way in Way if fits(x, way)}
        ways["ours"] = ours.all_reduce
        for launch in ways.values():
            check(launch(part(control.rank, control.size, x.numel(), DTYPE, device)), ours, size)
        sums[size] = _times(control, {name: partial(launch, x) for name, launch in ways.items()})
    norms: dict[int, Times] = {}
    weight = torch.ones(HIDDEN, dtype=DTYPE, device=device)
    for rows in ROWS:
        x, residual = torch.zeros(2, rows, HIDDEN, dtype=DTYPE, device=device)
        norms[rows] = _times(
            control,
            {
                "nccl": partial(_apart, libraries["nccl"], x, residual, weight),
                "ours": partial(_apart, ours, x, residual, weight),
                "fused": partial(all_reduce_add_rms_norm, x, residual, weight, EPS, peers),
            },
        )
        norms[rows]["chosen"] = norms[rows]["fused" if norm_is_fused(x, control.size) else "ours"]
    return sums, norms


def _apart(group: Collectives, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return add_rms_norm(group.all_reduce(x), residual, weight, EPS)


def _times(control: ControlGroup, launches: dict[str, Callable[[], object]]) -> Times:
    """Microseconds of one launch of each, median over the replays of its graph."""
    graphs = {name: _captured(control, launch) for name, launch in launches.items()}
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            graph.replay()  # the ranks come together in it
            events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            torch.cuda.synchronize()
            found[name] += [1e3 * float(one.elapsed_time(other)) / LAUNCHES for one, other in pairwise(events)]
    return {name: median(times) for name, times in found.items()}


def _captured(control: ControlGroup, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    launch()  # compiles, and lets NCCL connect
    torch.cuda.synchronize()
    control.minimum(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's threads may look at their own events meanwhile
        for _ in range(LAUNCHES):
            launch()
    graph.replay()
    torch.cuda.synchronize()
    control.minimum(0)
    return graph


def sums_report(ranks: int, sums: dict[int, Times]) -> Report:
    """sums: by bytes."""
    ways = [way.value for way in Way]
    names = [*LIBRARIES, *ways, "ours"]
    lines: list[Sequence[Value]] = []
    for size, times in sums.items():
        bus = 2 * (ranks - 1) / ranks * size / times["ours"] / 1e3
        lines.append((size / 1024, *(times.get(name) for name in names), times["ours"] / times["nccl"], bus))
    measured = {name: {size / 1024: times[name] for size, times in sums.items() if name in times} for name in ("nccl", *ways)}
    plotted = [Series(name, list(times), list(times.values())) for name, times in measured.items() if times]
    return Report(
        name="allreduce",
        columns=COLUMNS,
        rows=lines,
        notes=(
            f"{ranks} ranks, {DTYPE}, graphs of {LAUNCHES} sums, median of {ROUNDS * REPLAYS} replays in turns; ours: by `WAYS`",
            f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}; bus GB/s: of ours, what every rank sends at least, by its time",
        ),
        plots=[Plot(f"all-reduce over {ranks} GPUs", "KiB", "us", plotted, logarithmic=True)],
        raw={"ranks": ranks, "us": {str(size): times for size, times in sums.items()}},
    )


def _norms_report(ranks: int, norms: dict[int, Times]) -> Report:
    lines: list[Sequence[Value]] = [
        (
            rows,
            rows * HIDDEN * DTYPE.itemsize / 1024,
            *(times.get(name) for name in ("nccl", "ours", "fused", "chosen")),
            times["chosen"] / times["nccl"],
        )
        for rows, times in norms.items()
    ]
    return Report(
        name="allreduce-norm",
        columns=NORM_COLUMNS,
        rows=lines,
        notes=(f"{ranks} ranks, rows of {HIDDEN} {DTYPE}: the sum, the residual's addition and the norm; chosen: by NORM_BYTES",),
        raw={"ranks": ranks, "us": {str(rows): times for rows, times in norms.items()}},
    )
