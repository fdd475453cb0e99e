"""What a crowd costs the host: one plan for all of it, and a time for each part."""

from benchmarks.crowd import CROWDS, crowd


def test_each_part_is_timed_warm_and_cold() -> None:
    report = crowd(repeats=1)
    assert [tuple(row[:2]) for row in report.rows] == list(CROWDS)
    assert all(isinstance(us, float) and us > 0 for row in report.rows for us in row[2:])
    assert len(report.columns) == 8
