"""Decode, prefill and the offline task of one model after the other: each is started once for all that is measured of it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import decode, offline, prefill, profile, sampling
from benchmarks.ceilings import Ceilings, measure_ceilings
from benchmarks.decode import measure_decode
from benchmarks.offline import measure_offline
from benchmarks.prefill import measure_prefill
from benchmarks.profile import measure_gaps
from benchmarks.report import Report, Value, circumstances
from benchmarks.sampling import measure_sampling
from benchmarks.served import Options, Served, served
from benchmarks.workload import config_file, fresh
from services.worker.engine.profiled import DECODE
from shared.errors import LockstepError

REPEATS, QUICK_REPEATS = 3, 1
QUICK_SUSTAINED_S = 1.0
WARM_UP_TOKENS = 16
COLUMNS = {
    "offline": offline.COLUMNS,
    "prefill": prefill.COLUMNS,
    "decode": decode.COLUMNS,
    "sampling": sampling.COLUMNS,
    "gaps": profile.GAP_COLUMNS,
}
OF_PEERS = ("offline", "prefill", "decode")
Lines = list[Sequence[Value]]


@dataclass(frozen=True)
class Cases:
    """What is measured of each model; the defaults are what the peers were measured with."""

    names: tuple[str, ...] = OF_PEERS
    rows: tuple[int, ...] = decode.ROWS
    context: int = 1024  # tokens of a prompt, in decode and prefill
    tokens: int = 128  # decoded after them
    prefill_prompts: int = 16
    prompts: int = 256  # of the offline task, as are the next
    least: int = 100
    most: int = 1024
    sampling_rows: tuple[int, ...] = (256,)
    ways: tuple[str, ...] = tuple(sampling.WAYS)  # to sample
    gap_rows: tuple[int, ...] = (1, 256)


def measure_models(models: Sequence[str], cases: Cases, options: Options) -> tuple[list[Report], list[str]]:
    """The reports, and what went wrong with which model: the others are measured all the same. Raises ConfigError for no model."""
    for model in models:
        config_file(model)
    device = options.device_type
    ceilings = measure_ceilings(device, QUICK_SUSTAINED_S) if options.quick else measure_ceilings(device)
    gpu, failures = circumstances()["gpu"], []
    print(f"ceilings: {ceilings}", flush=True)
    lines: dict[str, Lines] = {name: [] for name in cases.names}
    raw: dict[str, object] = {"ceilings": ceilings._asdict()}
    also = {"sampling": cases.sampling_rows, "gaps": cases.gap_rows}
    rows = [*cases.rows, *(count for name in cases.names for count in also.get(name, ()))]
    requests = max(*rows, cases.prefill_prompts, min(cases.prompts, max(decode.ROWS)))
    for model in models:
        try:
            length, traced = 2 * max(cases.context, cases.most), "gaps" in cases.names
            with served(model, options, ceilings, gpu, requests, length, traced) as running:
                _measure(running, cases, QUICK_REPEATS if options.quick else REPEATS, lines, raw)
        except LockstepError as error:
            failures.append(f"{model}: {error}")
            print(f"failed: {failures[-1]}", file=sys.stderr, flush=True)
    return [_report(name, lines[name], ceilings, options, cases, raw) for name in cases.names], failures


def _measure(running: Served, cases: Cases, repeats: int, lines: dict[str, Lines], raw: dict[str, object]) -> None:
    vocabulary, longest = running.llm.vocab_size, running.llm.max_length - WARM_UP_TOKENS
    running.timed(fresh([min(64, longest)] * 4, vocabulary, 7), WARM_UP_TOKENS)
    running.timed(fresh([min(512, longest)] * 32, vocabulary, 8), WARM_UP_TOKENS, 0.6)
    if "offline" in lines:
        lines["offline"] += measure_offline(running, cases.prompts, cases.least, cases.most, repeats, raw)
    if "prefill" in lines:
        lines["prefill"] += measure_prefill(running, cases.prefill_prompts, cases.context, 2 * repeats - 1, raw)
    if "decode" in lines:
        lines["decode"] += measure_decode(running, cases.rows, cases.context, cases.tokens, repeats, raw)
    if "sampling" in lines:
        lines["sampling"] += measure_sampling(running, cases.sampling_rows, cases.ways, cases.context, cases.tokens, repeats, raw)
    if "gaps" in lines:  # at the end, since a profiler that has run once may slow what follows
        lines["gaps"] += measure_gaps(running, cases.gap_rows, cases.context, raw)


def _report(name: str, lines: Lines, ceilings: Ceilings, options: Options, cases: Cases, raw: dict[str, object]) -> Report:
    how = {
        "offline": "all prompts at once; the floor reads weights and KV cache once a step, at the ceilings",
        "prefill": "to the last first token",
        "decode": f"prompts of {cases.context} tokens, {cases.tokens} steps; checked: tokens that prefilling chooses too",
        "sampling": f"prompts of {cases.context} tokens, {cases.tokens} steps; all rows sampled alike, the ways in turns",
        "gaps": f"prompts of {cases.context} tokens, {DECODE.recorded} steps; busy: under torch's profiler",
    }
    return Report(
        name=name,
        columns=COLUMNS[name],
        rows=lines,
        notes=(
            f"ceilings, of this run: {ceilings}",
            f"random weights, through scheduler and worker over gRPC, medians; {how[name]}; "
            f"worker: {' '.join(f'{key}={value}' for key, value in options.worker.items()) or 'as it comes'}",
        ),
        raw={key: value for key, value in raw.items() if key == "ceilings" or f" {name}" in key},
    )
