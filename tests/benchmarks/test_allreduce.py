"""What is told of sums over GPUs; measuring them needs two."""

import pytest
import torch

from benchmarks.allreduce import allreduce, sums_report
from shared.errors import ConfigError


def test_the_table_has_every_size_and_the_plot_what_each_way_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))  # a build for CPUs has none
    nccl = {"nccl": 40.0, "pynccl": 41.0}
    small, large = {**nccl, "flagged": 2.0, "one-shot": 4.0, "two-shot": 8.0, "ours": 2.0}, {**nccl, "one-shot": 10.0, "ours": 10.0}
    report = sums_report(2, {1024: small, 1 << 20: large})
    told = [dict(zip(report.columns, row, strict=True)) for row in report.rows]
    assert [(line["KiB"], line["flagged us"], line["ours / nccl"]) for line in told] == [(1.0, 2.0, 0.05), (1024.0, None, 0.25)]
    assert told[1]["bus GB/s"] == pytest.approx(104.9, abs=0.1)
    (plot,) = report.plots
    assert {series.label: list(series.x) for series in plot.series} == {
        "nccl": [1.0, 1024.0],
        "flagged": [1.0],
        "one-shot": [1.0, 1024.0],
        "two-shot": [1.0],
    }


def test_ranks_without_a_gpu_each_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks: 99, each on a GPU of its own"):
        allreduce(99)
