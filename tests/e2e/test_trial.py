"""What `helm test` runs, against a stack that is as it should be and one that is not there."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stack import Stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, weightless_model: Path) -> Iterator[Stack]:
    script = {"default": {"ids": [40, 41], "repeat": True}}
    with Stack(tmp_path_factory.mktemp("trial"), model=weightless_model, engine="scripted", script=script) as running:
        yield running


def trial(name: str, url: str, metrics: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.gateway.trial", name, f"--url={url}", "--model=tiny", f"--metrics={metrics}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("name, seen", [("completion", "answer: '"), ("stream", " pieces: '"), ("metrics", " series at ")])
def test_trials_tell_what_they_saw_or_what_is_wrong(stack: Stack, name: str, seen: str) -> None:
    done = trial(name, stack.url, f"http://127.0.0.1:{stack.scheduler.ports['admin']}/metrics")
    assert (done.returncode, done.stderr) == (0, "")
    assert seen in done.stdout
    broken = trial(name, "http://127.0.0.1:1", "http://127.0.0.1:1/metrics")
    assert broken.returncode == 1
    assert f"{name}: http://127.0.0.1:1" in broken.stderr


def test_metrics_without_the_engine_are_told(stack: Stack) -> None:
    done = trial("metrics", stack.url, f"http://127.0.0.1:{stack.gateway.ports['admin']}/metrics")
    assert done.returncode == 1
    assert "lacks lockstep_kv_cache_usage_perc" in done.stderr
