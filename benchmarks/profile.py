"""Where a step's time goes on the device: by kernel, and between kernels. From a trace that a rank writes while it serves."""

import json
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median

import psutil

from benchmarks.ceilings import Ceilings, measure_ceilings
from benchmarks.floors import decode_step_s
from benchmarks.report import Report, Value, circumstances
from benchmarks.served import Options, Served, served
from benchmarks.workload import Prompts, fresh
from services.worker.engine.profiled import DECODE, PREFILL, TIMED, Kind

TRACE_S = 60.0  # for a trace to be written
SHOWN = 20  # kernels of the table; the others are one line
NAME_LENGTH = 70
SUMS = ("_flagged_kernel", "_one_shot_kernel", "_two_shot_kernel")
COMMUNICATION = ("nccl", *SUMS, "gloo:", "c10d::")  # in names of what ranks do together
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
SEED = 55
TIMED_REPEATS = 3
GAP_COLUMNS = ("model", "rows", "us a step", "us busy", "gaps", "us traced", "launches a step", "launches a layer")


@dataclass(frozen=True)
class Work:
    """A kernel, copy or, on a CPU, an operation; times in microseconds."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class StepTime:
    us: float
    busy_us: float  # with anything on the device
    gaps: float  # share of it with nothing
    launches_a_layer: int

    @classmethod
    def of(cls, work: Sequence[Work], kind: Kind, layers: int) -> "StepTime":
        """Of all recorded steps of a kind."""
        us = (max(each.end_us for each in work) - work[0].start_us) / kind.recorded
        busy_us = _busy_us(work) / kind.recorded
        launches = Counter(each.name for each in work)
        return cls(us, busy_us, 1 - busy_us / us, sum(number // kind.recorded // layers for number in launches.values()))


def profile(model: str, rows: Sequence[int], prompts: int, context: int, options: Options, out: Path) -> list[Report]:
    """One report for each number of decode rows, and one of steps that prefill so many new prompts at a time, unless it is 0; the
    traces stay in `out`."""
    device = options.device_type
    ceilings = measure_ceilings(device)
    folder = (out / "traces").absolute()
    if folder.exists():  # of an earlier run
        shutil.rmtree(folder)
    traced = replace(options, worker={**options.worker, "profile_folder": str(folder)})
    reports, most = [], max(*rows, prompts)
    with served(model, traced, ceilings, circumstances()["gpu"], most, 2 * context) as running:
        if prompts:
            trace, seeds = _ask(folder, PREFILL), count(SEED + 1)
            deadline = time.monotonic() + TRACE_S
            while not trace.exists() and time.monotonic() < deadline:
                running.timed(fresh([context] * prompts, running.llm.vocab_size, next(seeds)), 1)
            reports.append(_report(running, PREFILL, f"{prompts} prompts", context, ceilings, None, _work(_eventually(trace))))
        cached = fresh([context] * max(rows), running.llm.vocab_size, SEED)
        running.timed(cached, 2)
        for asked in rows:
            work = _decoded(running, folder, cached[:asked])
            floor_s = decode_step_s(running.shape, asked, context + DECODE.skipped + DECODE.recorded / 2, ceilings)
            reports.append(_report(running, DECODE, f"{asked} rows", context, ceilings, floor_s, work))
    return reports


def measure_gaps(running: Served, rows: Sequence[int], context: int, raw: dict[str, object]) -> list[Sequence[Value]]:
    """A line for each number of rows: in which share of a decode step nothing runs on the device.

    A trace tells for how long anything does. What the same steps take is told apart, by events alone: the profiler holds the host up.
    """
    assert running.traces is not None, "it was started to be traced"
    prompts = fresh([context] * max(rows), running.llm.vocab_size, SEED)
    running.timed(prompts, 1)
    lines: list[Sequence[Value]] = []
    for number in rows:
        if running.over:
            lines.append((running.name, number, *[None] * (len(GAP_COLUMNS) - 2)))
            continue
        times_us = [_timed_us(running, running.traces, prompts[:number]) for _ in range(TIMED_REPEATS)]
        work = _decoded(running, running.traces, prompts[:number])
        step, us = StepTime.of(work, DECODE, running.shape.layers), median(times_us)
        gaps, launches = 1 - step.busy_us / us, len(work) / DECODE.recorded
        lines.append((running.name, number, us, step.busy_us, f"{gaps:.2%}", step.us, launches, step.launches_a_layer))
        print(f"{running.name}: {number} rows, {gaps:.2%} of a step nothing runs on the device", flush=True)
        raw[f"{running.name} gaps {number}"] = {**asdict(step), "timed_us": times_us, "kernels_us": _kernels_us(work, DECODE)}
    return lines


def communication_share(running: Served, folder: Path, prompts: Prompts) -> float:
    """Of the time of decode steps of these rows, that rank 0 spends in kernels that ranks run together, waiting for each other included;
    a norm that is in one of them counts with it."""
    work = _decoded(running, folder, prompts)
    return communication_us(work) / (max(each.end_us for each in work) - work[0].start_us)


def communication_us(work: Sequence[Work]) -> float:
    """Time in which any of it was of those that ranks run together."""
    return _busy_us([each for each in work if any(part in each.name for part in COMMUNICATION)])


def _kernels_us(work: Sequence[Work], kind: Kind) -> dict[str, float]:
    """Of a step, by name, longest first."""
    times = defaultdict[str, float](float)
    for each in work:
        times[each.name] += (each.end_us - each.start_us) / kind.recorded
    return dict(sorted(times.items(), key=lambda each: -each[1]))


def _decoded(running: Served, folder: Path, prompts: Prompts) -> list[Work]:
    """What the device did in decode steps of these rows."""
    return _work(_recorded(running, folder, prompts, DECODE))


def _timed_us(running: Served, folder: Path, prompts: Prompts) -> float:
    """What a decode step of these rows takes."""
    us: float = json.loads(_recorded(running, folder, prompts, TIMED).read_text())["us"]
    return us


def _recorded(running: Served, folder: Path, prompts: Prompts, kind: Kind) -> Path:
    """What rank 0 writes of decode steps of these rows."""
    written = _ask(folder, kind)
    running.timed(prompts, 2 * (kind.skipped + kind.recorded))
    return _eventually(written)


def _ask(folder: Path, kind: Kind) -> Path:
    """Has the ranks record the next steps of a kind; what rank 0 will write. Those before are there."""
    trace = folder / f"rank-0-{kind.name}-{len(list(folder.glob(f'rank-0-{kind.name}-*.json')))}.json"
    for rank in _ranks():
        rank.send_signal(kind.signal)
    return trace


def _ranks() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if "services.worker.rank" in each.cmdline()]


def _eventually(trace: Path) -> Path:
    deadline = time.monotonic() + TRACE_S
    while not trace.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no trace {trace} after {TRACE_S:g} s")
        time.sleep(0.05)
    return trace


def _work(trace: Path) -> list[Work]:
    """What the device did, in order; on a CPU the outermost operations."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    kinds = ON_DEVICE if any(event.get("cat") in ON_DEVICE for event in events) else ("cpu_op",)
    found = [Work(event["name"], event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in kinds]
    found.sort(key=lambda work: (work.start_us, -work.end_us))
    if kinds == ON_DEVICE:
        return found
    outermost: list[Work] = []
    for work in found:
        if not outermost or work.start_us >= outermost[-1].end_us:
            outermost.append(work)
    return outermost


def _busy_us(work: Sequence[Work]) -> float:
    """Time in which anything ran: what overlaps counts once."""
    busy, until = 0.0, 0.0
    for each in work:
        busy += max(0.0, each.end_us - max(each.start_us, until))
        until = max(until, each.end_us)
    return busy


def _report(
    running: Served, kind: Kind, what: str, context: int, ceilings: Ceilings, floor_s: float | None, work: Sequence[Work]
) -> Report:
    steps = kind.recorded
    step, launches, times = StepTime.of(work, kind, running.shape.layers), Counter(each.name for each in work), _kernels_us(work, kind)
    total_us, names = sum(times.values()), list(times)

    def line(label: str, names: Sequence[str]) -> Sequence[Value]:
        us = sum(times[name] for name in names)
        return label, sum(launches[name] for name in names) / steps, us, f"{us / total_us:.1%}"

    lines = [line(name[:NAME_LENGTH], [name]) for name in names[:SHOWN]]
    if names[SHOWN:]:
        lines.append(line(f"{len(names) - SHOWN} others", names[SHOWN:]))
    floor_us = None if floor_s is None else 1e6 * floor_s
    return Report(
        name=f"profile-{what.split()[0] if kind == DECODE else kind.name}",
        columns=("kernel", "launches a step", "us a step", "of all"),
        rows=[*lines, ("all", len(work) / steps, total_us, None)],
        notes=(
            f"in sums and gathers over ranks {communication_us(work) / steps:.1f} us a step, with the norms that are in them",
            f"{running.name}, {kind.name}, {what} of {context} tokens, {steps} steps under torch's profiler, which slows them",
            f"a step {step.us:.1f} us, of it {step.busy_us:.1f} us busy; gaps {step.gaps:.2%}; {step.launches_a_layer} launches a layer",
            f"{'' if floor_us is None else f'floor {floor_us:.1f} us; '}ceilings, of this run: {ceilings}",
        ),
        raw={
            "step_us": step.us,
            "busy_us": step.busy_us,
            "communication_us": communication_us(work) / steps,
            "gap_share": step.gaps,
            "launches_a_layer": step.launches_a_layer,
            "floor_us": floor_us,
        },
    )
