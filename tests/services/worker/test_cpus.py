"""How many CPUs a worker takes itself to have."""

import os
from pathlib import Path

import pytest

from services.worker import cpus

CPUS = 8  # of the machine


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(CPUS)))


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, CPUS),
        ({"cpu.max": "max 100000\n"}, CPUS),
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "390000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, CPUS),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, CPUS),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ],
)
def test_the_quota_of_the_cgroup_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpus.available(tmp_path) == expected
