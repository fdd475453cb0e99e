"""A running stack for benchmarks: started as a user starts it, and stopped."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_S = 300.0


@dataclass(frozen=True)
class RunningStack:
    url: str  # of the gateway
    model: str  # the name it serves
    model_folder: Path
    ports: dict[str, int]  # by service


@contextlib.contextmanager
def stack(*arguments: str) -> Iterator[RunningStack]:
    """`lockstep serve ARGUMENTS` on a free port, until the block ends. Raises RuntimeError when it does not become ready."""
    with tempfile.TemporaryDirectory(prefix="lockstep-benchmark-") as folder:
        command = [str(Path(sys.executable).with_name("lockstep")), "serve", *arguments, "--port", "0"]
        process = subprocess.Popen(command, cwd=folder)
        try:
            yield _wait_until_ready(process, Path(folder) / ".lockstep")
        finally:
            process.terminate()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], folder: Path) -> RunningStack:
    deadline = time.monotonic() + START_S
    while not (found := list(folder.glob("run-*.json"))):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the stack did not become ready: status {process.poll()}")
        time.sleep(0.05)
    run = json.loads(found[0].read_text())
    return RunningStack(run["url"], run["served_model_names"][0], Path(run["model"]), run["ports"])
