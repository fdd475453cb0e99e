"""The benchmarks of models, small and on the CPU: every line is measured, checked and written; what is wrong is not reported as fast."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.ceilings import Ceilings
from benchmarks.decode import measure_decode
from benchmarks.models import Cases, measure_models
from benchmarks.profile import Work, communication_us, profile
from benchmarks.report import Report, Value
from benchmarks.sampling import GREEDY, WAYS
from benchmarks.served import Options, Served, WrongOutput
from services.local import LLM
from services.worker.engine.profiled import DECODE
from services.worker.engine.roofline import Shape
from tests import tiny

CASES = Cases(
    names=("offline", "prefill", "decode", "sampling", "gaps"),
    rows=(1, 3),
    context=40,
    tokens=12,
    prefill_prompts=3,
    prompts=10,
    least=5,
    most=30,
    sampling_rows=(1, 3),
    gap_rows=(1, 3),
)
OPTIONS = Options(device="cpu", quick=True, worker={"threads": 1})
ONE = Ceilings(1e9, 1e9, 1e9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    folder = tmp_path_factory.mktemp("shapes") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny.CONFIG))
    return folder


@pytest.fixture(scope="module")
def reports(folder: Path) -> dict[str, Report]:
    """Of one start."""
    found, failures = measure_models([str(folder)], CASES, OPTIONS)
    assert not failures
    return {report.name: report for report in found}


def lines(report: Report) -> list[dict[str, Value]]:
    return [dict(zip(report.columns, row, strict=True)) for row in report.rows]


def test_decode_has_a_line_for_each_number_of_rows_and_agrees_with_prefill(reports: dict[str, Report]) -> None:
    found = lines(reports["decode"])
    assert [(line["model"], line["rows"]) for line in found] == [("tiny", 1), ("tiny", 3)]
    assert [line["checked"] for line in found] == ["100%", "100%"]  # float32: near-ties are rare
    for line in found:  # of no use as figures: one run, on a machine that may be busy
        assert {type(line[name]) for name in ("ms a step", "of the device", "floor")} == {float}


def test_offline_counts_the_tokens_that_were_asked_for(reports: dict[str, Report]) -> None:
    (line,) = lines(reports["offline"])
    assert isinstance(line["s"], float)
    assert isinstance(line["new tokens"], int)
    assert line["tokens/s"] == pytest.approx(line["new tokens"] / line["s"])


def test_prefill_and_what_is_written(reports: dict[str, Report], tmp_path: Path) -> None:
    (line,) = lines(reports["prefill"])
    assert (line["prompts"], line["tokens"], line["best peer ms"]) == (3, 40, None)
    reports["prefill"].write(tmp_path)
    written = json.loads((tmp_path / "prefill.json").read_text())
    assert written["raw"]["ceilings"].keys() == {"read", "matrix", "sustained"}
    assert len(written["raw"]["tiny prefill"]) == 1


def test_ways_to_sample_are_compared_with_greedy(reports: dict[str, Report]) -> None:
    found = lines(reports["sampling"])
    assert [(line["rows"], line["sampling"]) for line in found] == [(rows, way) for rows in (1, 3) for way in WAYS]
    assert {line["over greedy"] for line in found if line["sampling"] == GREEDY} == {"+0.0%"}
    assert all(isinstance(line["ms a step"], float) for line in found)


def test_gaps_are_the_share_of_a_step_without_work(reports: dict[str, Report]) -> None:
    found = lines(reports["gaps"])
    assert [line["rows"] for line in found] == [1, 3]
    for line in found:
        us, busy_us = line["us a step"], line["us busy"]
        assert isinstance(us, float)
        assert isinstance(busy_us, float)
        assert line["gaps"] == f"{1 - busy_us / us:.2%}"
    raw = reports["gaps"].raw["tiny gaps 3"]
    assert isinstance(raw, dict)
    assert raw["kernels_us"]["aten::linear"] > 0


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model whose decoding says 40, 41, 42, 43, 40 ... and whose prefill always 40."""
    folder = tiny.weightless_model(tmp_path_factory.mktemp("scripted") / "tiny")
    script = folder / "script.json"
    script.write_text(json.dumps({"default": {"ids": [40, 41, 42, 43], "repeat": True}}))
    with LLM(folder, engine="scripted", script=script, progress=False) as llm:
        yield Served("scripted", llm, Shape.from_config(tiny.CONFIG), ONE, "none", 1, time.monotonic() + 60)


def test_decoding_that_differs_from_prefilling_is_an_error(scripted: Served) -> None:
    with pytest.raises(WrongOutput, match="scripted: at temperature 0, decoding 2 rows and prefilling agree on"):
        scripted.check([[5, 6], [7, 8]])


def test_lines_that_do_not_fit_into_the_time_are_left_out(scripted: Served) -> None:
    late = Served(scripted.name, scripted.llm, scripted.shape, ONE, "none", 1, deadline=time.monotonic())
    (line,) = measure_decode(late, [1], 5, 2, 1, {})
    assert line[:3] == ("scripted", 1, None)
    assert line[-2] == "no time left"


def test_what_cannot_start_is_told_beside_the_tables(folder: Path) -> None:
    found, failures = measure_models([str(folder)], CASES, Options(device="cpu", quick=True, worker={"dtype": "int3"}))
    assert [(report.name, list(report.rows)) for report in found] == [(name, []) for name in CASES.names]
    assert len(failures) == 1
    assert "dtype" in failures[0]


def test_a_profile_tells_the_kernels_of_a_step(folder: Path, tmp_path: Path) -> None:
    prefill, first, second = profile(str(folder), [1, 2], 2, 20, OPTIONS, tmp_path)
    assert [prefill.name, first.name, second.name] == ["profile-prefill", "profile-1", "profile-2"]
    assert next(row for row in prefill.rows if row[0] == "aten::linear")[1] == 4 * tiny.CONFIG["num_hidden_layers"] + 1
    assert prefill.raw["floor_us"] is None
    launches: dict[Value, Sequence[Value]] = {row[0]: row for row in second.rows}
    assert launches["aten::linear"][1] == 4 * tiny.CONFIG["num_hidden_layers"] + 1
    assert second.raw.keys() == {"step_us", "busy_us", "communication_us", "gap_share", "launches_a_layer", "floor_us"}
    assert second.raw["communication_us"] == 0  # of one rank
    trace = json.loads((tmp_path / "traces/rank-0-decode-1.json").read_text())
    assert sum(event["name"] == "aten::linear" for event in trace["traceEvents"]) >= DECODE.recorded * 9


def test_a_mistake_on_the_command_line_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "decode", "--model", "nope"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("benchmarks: model: nope is neither a shape")


def test_time_together_counts_what_overlaps_once() -> None:
    names = ["_flagged_kernel", "ncclDevKernel_AllGather_RING_LL(...)", "gemm", "_two_shot_kernel"]
    spans = [(0.0, 4.0), (2.0, 5.0), (5.0, 9.0), (9.0, 10.0)]
    assert communication_us([Work(name, *span) for name, span in zip(names, spans, strict=True)]) == 6.0
