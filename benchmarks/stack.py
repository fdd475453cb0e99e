"""A running stack for benchmarks: started as a user starts it, and stopped."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.worker.weights.demo import demo_model

START_S = 300.0


@dataclass(frozen=True)
class RunningStack:
    url: str  # of the gateway
    model: str  # the name it serves
    model_folder: Path
    ports: dict[str, int]  # by service
    admin_ports: dict[str, int]


def port_of(url: str) -> int:
    """The port of a URL without a path."""
    return int(url.rsplit(":", 1)[1])


def listener(url: str) -> int:
    """The process that listens at the URL's port."""
    return next(
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.laddr and connection.laddr.port == port_of(url) and connection.status == psutil.CONN_LISTEN and connection.pid
    )


@contextlib.contextmanager
def stack(*arguments: str, **settings: object) -> Iterator[RunningStack]:
    """`lockstep serve ARGUMENTS` on a free port, until the block ends; settings: of services, as `worker_max_num_seqs=256`.

    Raises RuntimeError when it does not become ready.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-benchmark-") as folder:
        command = [str(Path(sys.executable).with_name("lockstep")), "serve", *arguments, "--port", "0"]
        environment = {f"LOCKSTEP_{name.upper()}": str(value) for name, value in settings.items()}
        process = subprocess.Popen(command, cwd=folder, env={**os.environ, **environment})
        try:
            yield _wait_until_ready(process, Path(folder) / ".lockstep")
        finally:
            process.terminate()
            process.wait()


@contextlib.contextmanager
def scripted_stack(script: Mapping[str, object], max_length: int, **settings: object) -> Iterator[RunningStack]:
    """A stack whose engine plays `script`, with the demo model's tokenizer and a context of `max_length` tokens."""
    with tempfile.TemporaryDirectory(prefix="lockstep-benchmark-") as folder:
        model, script_file = Path(folder) / "scripted", Path(folder) / "script.json"
        shutil.copytree(demo_model(), model, ignore=shutil.ignore_patterns("*.safetensors"))
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": max_length}))
        header = b"{}"  # weights that name no tensors
        (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        script_file.write_text(json.dumps(script))
        with stack(str(model), "--engine", "scripted", "--script", str(script_file), **settings) as running:
            yield running


def _wait_until_ready(process: subprocess.Popen[bytes], folder: Path) -> RunningStack:
    deadline = time.monotonic() + START_S
    while not (found := list(folder.glob("run-*.json"))):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the stack did not become ready: status {process.poll()}")
        time.sleep(0.05)
    run = json.loads(found[0].read_text())
    return RunningStack(run["url"], run["served_model_names"][0], Path(run["model"]), run["ports"], run["admin_ports"])
