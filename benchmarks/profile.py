"""Where a decode step's time goes on the device: by kernel, and between kernels. From a trace that a rank writes while it serves."""

import json
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from benchmarks.ceilings import Ceilings, measure_ceilings
from benchmarks.floors import decode_step_s
from benchmarks.report import Report, Value, circumstances
from benchmarks.served import Options, Served, served
from benchmarks.workload import fresh
from services.worker.engine.profiled import RECORDED, SKIPPED

TRACE_S = 60.0  # for a trace to be written
SHOWN = 20  # kernels of the table; the others are one line
NAME_LENGTH = 70
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
SEED = 55


@dataclass(frozen=True)
class Work:
    """A kernel, copy or, on a CPU, an operation; times in microseconds."""

    name: str
    start_us: float
    end_us: float


def profile(model: str, rows: Sequence[int], context: int, options: Options, out: Path) -> list[Report]:
    """One report for each number of rows; the traces stay in `out`."""
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    ceilings = measure_ceilings(device)
    folder = (out / "traces").absolute()
    traced = replace(options, worker={**options.worker, "profile_folder": str(folder)})
    reports = []
    with served(model, traced, ceilings, circumstances()["gpu"], max(rows), 2 * context) as running:
        prompts = fresh([context] * max(rows), running.llm.vocab_size, SEED)
        running.timed(prompts, 2)
        for number, asked in enumerate(rows):
            trace = folder / f"rank-0-{number}.json"
            trace.unlink(missing_ok=True)  # of an earlier run
            for rank in _ranks():
                rank.send_signal(signal.SIGUSR2)
            running.timed(prompts[:asked], 2 * (SKIPPED + RECORDED))
            reports.append(_report(running, asked, context, ceilings, _work(_eventually(trace))))
    return reports


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


def _report(running: Served, rows: int, context: int, ceilings: Ceilings, work: Sequence[Work]) -> Report:
    launches, times = Counter(each.name for each in work), defaultdict[str, float](float)
    for each in work:
        times[each.name] += each.end_us - each.start_us
    step_us = (max(each.end_us for each in work) - work[0].start_us) / RECORDED
    busy_us, total_us = _busy_us(work) / RECORDED, sum(times.values()) / RECORDED
    ordered = sorted(times, key=lambda name: -times[name])
    lines: list[Sequence[Value]] = [_line(name[:NAME_LENGTH], [name], launches, times, total_us) for name in ordered[:SHOWN]]
    if ordered[SHOWN:]:
        lines.append(_line(f"{len(ordered) - SHOWN} others", ordered[SHOWN:], launches, times, total_us))
    layers = running.shape.layers
    in_layers = sum(count // RECORDED // layers for count in launches.values())
    gaps = 1 - busy_us / step_us
    floor_us = 1e6 * decode_step_s(running.shape, rows, context + SKIPPED + RECORDED / 2, ceilings)
    return Report(
        name=f"profile-{rows}",
        columns=("kernel", "launches a step", "us a step", "of all"),
        rows=[*lines, ("all", len(work) / RECORDED, total_us, None)],
        notes=(
            f"{running.name}, {rows} rows, prompts of {context} tokens, {RECORDED} steps under torch's profiler, which slows them",
            f"a step {step_us:.1f} us, of it {busy_us:.1f} us busy; gaps {gaps:.2%}; {in_layers} launches a layer",
            f"floor {floor_us:.1f} us; ceilings, of this run: {ceilings}",
        ),
        raw={
            "step_us": step_us,
            "busy_us": busy_us,
            "gap_share": gaps,
            "launches_a_layer": in_layers,
            "floor_us": floor_us,
        },
    )


def _line(label: str, names: Sequence[str], launches: Counter[str], times: dict[str, float], total_us: float) -> Sequence[Value]:
    us = sum(times[name] for name in names) / RECORDED
    return label, sum(launches[name] for name in names) / RECORDED, us, f"{us / total_us:.1%}"
