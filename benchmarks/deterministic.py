"""What the deterministic mode costs: decoding with it and without, by two workers one after the other."""

from collections.abc import Sequence

from benchmarks import decode
from benchmarks.ceilings import measure_ceilings
from benchmarks.models import QUICK_REPEATS, QUICK_SUSTAINED_S, REPEATS, Cases
from benchmarks.report import Report, Value, circumstances
from benchmarks.served import Options, WrongOutput, served

COLUMNS = ("model", "rows", "ms a step", "deterministic", "times as long", "checked", "deterministic")
ROWS, STEP_MS, CHECKED = (decode.COLUMNS.index(name) for name in ("rows", "ms a step", "checked"))


def deterministic(models: Sequence[str], cases: Cases, options: Options) -> Report:
    """A line for each model and number of rows. Raises WrongOutput when decoding and prefilling differ in any token in the mode."""
    device = options.device_type
    ceilings = measure_ceilings(device, QUICK_SUSTAINED_S)
    gpu, repeats = circumstances()["gpu"], QUICK_REPEATS if options.quick else REPEATS
    rows: list[Sequence[Value]] = []
    raw: dict[str, object] = {}
    for model in models:
        measured: list[list[Sequence[Value]]] = []
        for mode in (False, True):
            changed = Options(device, options.quick, options.limit_s, {**options.worker, "deterministic": mode})
            found: dict[str, object] = {}
            with served(model, changed, ceilings, gpu, max(cases.rows), 2 * cases.context) as running:
                measured.append(decode.measure_decode(running, cases.rows, cases.context, cases.tokens, repeats, found))
            raw["deterministic" if mode else "default"] = found
        for usual, fixed in zip(*measured, strict=True):
            before_ms, after_ms = usual[STEP_MS], fixed[STEP_MS]
            if not isinstance(before_ms, float) or not isinstance(after_ms, float):
                continue  # no time was left
            if fixed[CHECKED] != "100%":
                raise WrongOutput(f"{model}: decoding {fixed[ROWS]} rows and prefilling agree on {fixed[CHECKED]} of the tokens")
            rows.append((usual[0], usual[ROWS], before_ms, after_ms, after_ms / before_ms, usual[CHECKED], fixed[CHECKED]))
    return Report(
        name="deterministic",
        columns=COLUMNS,
        rows=rows,
        notes=(f"random weights, greedy, prompts of {cases.context} tokens, {cases.tokens} steps; ceilings, of this run: {ceilings}",),
        raw=raw,
    )
