"""The figures of a page, from what several runs have written."""

import json
from pathlib import Path

import pytest

from benchmarks import decode, offline, prefill
from benchmarks.comparison import comparison
from benchmarks.report import Value
from shared.errors import ConfigError

COLUMNS = {"offline": offline.COLUMNS, "prefill": prefill.COLUMNS, "decode": decode.COLUMNS}


def written(folder: Path, model: str, step_ms: float | None, peer_ms: float | None) -> Path:
    """What `peers` leaves of a model."""
    folder.mkdir()
    values: dict[str, Value] = {"model": model, "rows": 8, "tokens/s": 12345.6, "best peer": 10_000, "ms": 50.24, "of the floor": "66%"}
    for kind, columns in COLUMNS.items():
        line = dict.fromkeys(columns, None) | {name: value for name, value in values.items() if name in columns}
        if kind == "decode":
            line |= {"ms a step": step_ms, "best peer": peer_ms, "peer / ours": peer_ms / step_ms if peer_ms and step_ms else None}
        (folder / f"{kind}.json").write_text(json.dumps({"columns": columns, "rows": [list(line.values())]}))
    return folder


def test_runs_go_together_and_the_last_of_a_model_counts(tmp_path: Path) -> None:
    folders = [
        written(tmp_path / "1", "small", 2.0, 3.0),
        written(tmp_path / "2", "large", 8.0, 8.5),
        written(tmp_path / "3", "small", 1.5, 3.0),
        written(tmp_path / "4", "large", None, 8.5),
    ]
    text, report = comparison(folders)
    assert "| small | 12,346 | 10,000 |" in text
    assert "| ms a step, by rows | 8 |" in text
    assert "| small | **1.50** |\n| best peer | 3.00 |\n| of the floor | 66% |\n| large | **8.00** |" in text
    assert [(series.label, *series.x, *series.y) for series in report.plots[0].series] == [
        ("small", 8, 2.0),
        ("large", 8, 8.5 / 8),
        ("best peer", 8, 1.0),
    ]


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not there; `python -m benchmarks peers --out"):
        comparison([tmp_path])
    with pytest.raises(ConfigError, match=r"not all lines of decode\.json have a peer"):
        comparison([written(tmp_path / "1", "small", 2.0, None)])
