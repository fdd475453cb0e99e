"""The tables and the plot of docs/benchmarks.md, from the JSON of one or several runs of `python -m benchmarks peers`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.report import Plot, Report, Series, Value
from shared.errors import ConfigError

Line = Mapping[str, Value]
MEASURED = {"offline": "tokens/s", "prefill": "ms", "decode": "ms a step"}
KINDS = {
    "offline": ("model", "tokens/s", "best peer", "ours / peer", "floor", "of the floor", "device busy"),
    "prefill": ("model", "ms", "of the device", "best peer ms", "peer / ours", "TFLOP/s", "of sustained"),
}


def comparison(folders: Sequence[Path]) -> tuple[str, Report]:
    """Markdown, and a report with the plot. Of what was measured twice, the last folder counts.

    Raises ConfigError for a folder without reports, and where there are no peers to compare with.
    """
    tables = [markdown(columns, [[line[name] for name in columns] for line in _lines(folders, kind)]) for kind, columns in KINDS.items()]
    decode: dict[str, dict[int, Line]] = {}
    for line in _lines(folders, "decode"):
        decode.setdefault(str(line["model"]), {})[int(line["rows"] or 0)] = line
    rows = sorted({count for lines in decode.values() for count in lines})
    cells: list[list[Value]] = []
    for model, lines in decode.items():
        found = [lines.get(count, {}) for count in rows]
        cells.append([model, *(f"**{_text(line.get('ms a step'))}**" for line in found)])
        cells.append(["best peer", *(line.get("best peer") for line in found)])
        cells.append(["of the floor", *(line.get("of the floor") for line in found)])
    tables.append(markdown(["ms a step, by rows", *map(str, rows)], cells))
    series = [
        Series(model, [*lines], [ratio for line in lines.values() if isinstance(ratio := line["peer / ours"], float)])
        for model, lines in decode.items()
    ]
    if any(len(each.x) != len(each.y) for each in series):
        raise ConfigError(f"{', '.join(map(str, folders))}: not all lines of decode.json have a peer")
    series.append(Series("best peer", rows, [1.0] * len(rows)))
    plot = Plot("Decode: the best peer's time over ours", "rows", "times", series)
    return "\n\n".join(tables), Report("comparison", (), (), plots=(plot,))


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Value]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_text(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: Value) -> str:
    if isinstance(value, int | float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")
    return value or ""


def _lines(folders: Sequence[Path], kind: str) -> list[Line]:
    """What was measured, by model and, in decode, rows."""
    found: dict[tuple[Value, Value], Line] = {}
    for folder in folders:
        try:
            report = json.loads((folder / f"{kind}.json").read_text())
        except FileNotFoundError as error:
            raise ConfigError(f"{error.filename}: not there; `python -m benchmarks peers --out {folder}` writes it") from error
        for row in report["rows"]:
            line = dict(zip(report["columns"], row, strict=True))
            if line[MEASURED[kind]] is not None:
                found[line["model"], line.get("rows")] = line
    return list(found.values())
