"""What sampling costs a decode step: ways to sample, each by all rows, beside greedy ones of the same worker in the same run.

Random weights give logits that hardly differ, of which top-p keeps nearly all: more work than those of a trained model.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.report import Value
from benchmarks.served import Served
from benchmarks.workload import fresh

# "over greedy": of the milliseconds a step; "on the device": the same of those in which the device computed
COLUMNS = ("model", "rows", "sampling", "ms a step", "spread", "of the device", "over greedy", "on the device", "at most")
GREEDY, ALL = "greedy", "temperature, top-p, penalties"
WARM: dict[str, Any] = {"temperature": 0.7}
WAYS: dict[str, dict[str, Any]] = {
    GREEDY: {},
    "temperature": WARM,
    "temperature, top-k": {**WARM, "top_k": 20},
    "temperature, top-p": {**WARM, "top_p": 0.9},
    ALL: {**WARM, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "greedy, log-probabilities": {"logprobs": 5},
}
AT_MOST = {("Qwen3-0.6B", 256): 0.06, ("Qwen3-14B", 256): 0.03}  # of ALL over greedy, on an H200
SEED = 55


def measure_sampling(
    served: Served, rows: Sequence[int], ways: Sequence[str], context: int, tokens: int, repeats: int, raw: dict[str, object]
) -> list[Sequence[Value]]:
    """A line for each number of rows and each way of WAYS, GREEDY among them; their runs take turns."""
    prompts = fresh([context] * max(rows), served.llm.vocab_size, SEED)
    served.timed(prompts, 1)
    lines: list[Sequence[Value]] = []
    for number in rows:
        asked = prompts[:number]
        long: dict[str, list[float]] = {way: [] for way in ways}
        short: dict[str, list[float]] = {way: [] for way in ways}
        device: dict[str, list[float]] = {way: [] for way in ways}  # seconds a step
        for way in ways:
            served.timed(asked, 2, **WAYS[way])  # whatever the first answer of a kind compiles
        for repeat in range(repeats):
            if served.over and repeat:
                break
            for way in ways:
                sampling = WAYS[way]
                short[way].append(served.timed(asked, 1, **sampling))
                before = served.steps()
                long[way].append(served.timed(asked, 1 + tokens, **sampling))
                after = served.steps()
                device[way].append((after.decode_s - before.decode_s) / max(after.decodes - before.decodes, 1))
        agreed = served.check(asked)
        step_s = {way: (median(long[way]) - median(short[way])) / tokens for way in ways}
        device_s = {way: median(device[way]) for way in ways}
        raw[f"{served.name} sampling {number}"] = {"checked": agreed, "long_s": long, "short_s": short, "device_s": device}
        for way in ways:
            most = AT_MOST.get((served.name, number)) if way == ALL else None
            line = (
                f"{(max(long[way]) - min(long[way])) / median(long[way]):.1%}",
                1e3 * device_s[way],
                f"{step_s[way] / step_s[GREEDY] - 1:+.1%}",
                f"{device_s[way] / device_s[GREEDY] - 1:+.1%}",
                None if most is None else f"{most:+.0%}",
            )
            lines.append((served.name, number, way, 1e3 * step_s[way], *line))
            print(f"{served.name}: {number} rows, {way}: {1e3 * step_s[way]:.3f} ms a step", flush=True)
    return lines
