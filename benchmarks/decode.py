"""Decode: milliseconds a step, by the number of rows, through the services.

The prompts are computed once and stay in the prefix cache, so that asking them again costs little; then n + 1 tokens of each, less 1
token of each, took n steps. That is how the peers were measured.
"""

from collections.abc import Sequence
from statistics import median

from benchmarks.floors import decode_step_s
from benchmarks.profile import communication_share
from benchmarks.report import Value
from benchmarks.served import Served
from benchmarks.workload import fresh

ROWS = (1, 8, 32, 128, 256)
# "of the device": of the milliseconds, in which it computed; "host": in which it did not; "together": the share of them in which
# ranks added up or gathered
COLUMNS = (
    "model",
    "rows",
    "ms a step",
    "spread",
    "of the device",
    "host us",
    "floor",
    "of the floor",
    "best peer",
    "peer / ours",
    "checked",
    "together",
)
SEED = 55


def measure_decode(
    served: Served, rows: Sequence[int], context: int, tokens: int, repeats: int, raw: dict[str, object]
) -> list[Sequence[Value]]:
    """One line for each number of rows, each with prompts of `context` tokens."""
    prompts = fresh([context] * max(rows), served.llm.vocab_size, SEED)
    served.timed(prompts, 1)
    lines: list[Sequence[Value]] = []
    for number in rows:
        if served.over:
            lines.append((served.name, number, *[None] * (len(COLUMNS) - 4), "no time left", None))
            continue
        asked = prompts[:number]
        served.timed(asked, 2)  # whatever the first answer of this size compiles
        first = served.steps()
        short = [served.timed(asked, 1) for _ in range(repeats)]
        before = served.steps()
        long = [served.timed(asked, 1 + tokens) for _ in range(repeats)]
        after = served.steps()
        step_ms = 1e3 * (median(long) - median(short)) / tokens
        decodes, decode_s = after.decodes - before.decodes, after.decode_s - before.decode_s
        # Of long answers less that of short ones, on both sides: prefill and what each call begins and ends with count in neither.
        device_s = (after.busy_s - before.busy_s) - (before.busy_s - first.busy_s)
        host_us = 1e6 * (sum(long) - sum(short) - device_s) / (repeats * tokens)
        floor_ms = 1e3 * decode_step_s(served.shape, number, context + tokens / 2, served.ceilings)
        peer_ms = served.peers.decode_ms.get(number) if served.peers else None
        agreed = served.check(asked)
        lines.append(
            (
                served.name,
                number,
                step_ms,
                f"{(max(long) - min(long)) / median(long):.1%}",
                1e3 * decode_s / decodes if decodes else None,
                host_us,
                floor_ms,
                f"{floor_ms / step_ms:.0%}",
                peer_ms,
                peer_ms / step_ms if peer_ms else None,
                f"{agreed:.0%}",
                None,
            )
        )
        print(f"{served.name}: {number} rows decode in {step_ms:.3f} ms a step", flush=True)
        raw[f"{served.name} decode {number}"] = {"short_s": short, "long_s": long, "device_s": decode_s, "device_steps": decodes}
    if served.ranks == 1:
        return lines
    assert served.traces is not None, "of several ranks it is known where they write them"
    # At the end, since a profiler that has run once may slow what follows.
    measured = [number for number, line in zip(rows, lines, strict=True) if line[2] is not None]
    shares = {number: communication_share(served, served.traces, prompts[:number]) for number in measured if not served.over}
    raw[f"{served.name} decode together"] = {str(number): share for number, share in shares.items()}
    return [(*line[:-1], f"{shares[number]:.1%}" if number in shares else None) for number, line in zip(rows, lines, strict=True)]
