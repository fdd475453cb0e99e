"""The images, really built from a local base and run together as the chart runs them: as nobody, on a read-only root file system."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BASE = "localhost/lockstep-test-base:latest"
TAG = "test"
TARGETS = ("gateway", "scheduler", "worker-cpu")
MOST_ADDED_BYTES = 350 << 20  # by gateway and scheduler, to their base
CONFINED = ("--read-only", "--tmpfs=/tmp:mode=1777", "--user=10001:10001", "--cap-drop=all", "--security-opt=no-new-privileges")
PODMAN_CONFIG = """
[engine]
runtime = "runc"
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=20000:20000"]
"""
ASK = """
import json, sys, urllib.request
body = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 16}
headers = {"Content-Type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode(), headers)
print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"])
"""


class Podman:
    def __init__(self, folder: Path) -> None:
        config = folder / "containers.conf"
        config.write_text(PODMAN_CONFIG)
        self.env = {**os.environ, "CONTAINERS_CONF": str(config)}

    def __call__(self, *arguments: str, check: bool = True, timeout: float = 300) -> str:
        done = subprocess.run(["podman", *arguments], env=self.env, capture_output=True, text=True, timeout=timeout)
        if check and done.returncode:
            raise AssertionError(f"podman {' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done.stdout + ("" if check else done.stderr)

    def size(self, image: str) -> int:
        return int(json.loads(self("image", "inspect", image))[0]["Size"])


@pytest.fixture(scope="module")
def podman(debian: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Podman:
    debian("podman", "runc", "debootstrap", "make")
    return Podman(tmp_path_factory.mktemp("podman"))


@pytest.fixture(scope="module")
def images(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> Podman:
    """Builds them; the base is a Debian of this machine's release, so that the wheels of this Python fit."""
    root = tmp_path_factory.mktemp("base") / "root"
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)["VERSION_CODENAME"]
    command = ["debootstrap", "--variant=minbase", "--include=python3,python3-venv", release, str(root)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=400)
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as archive:
        subprocess.run(["podman", "import", "-", BASE], check=True, env=podman.env, stdin=archive.stdout, capture_output=True, timeout=200)
    assert archive.returncode == 0
    python = subprocess.run(["chroot", str(root), "python3", "--version"], check=True, capture_output=True, text=True).stdout
    version = ".".join(python.split()[1].split(".")[:2])
    make = ["make", f"PYTHON={sys.executable}", f"IMAGE_PYTHON={version}"]
    subprocess.run([*make, "wheels"], cwd=ROOT, check=True, capture_output=True, timeout=400)
    make += [
        "ENGINE=podman",
        f"TAG={TAG}",
        f"BASE={BASE}",
        f"WORKER_BASE={BASE}",
        "BUILD_FLAGS=--pull=never",
        f"TARGETS={' '.join(TARGETS)}",
    ]
    built = subprocess.run([*make, "images"], cwd=ROOT, env=podman.env, capture_output=True, text=True, timeout=900)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    return podman


@pytest.fixture
def together(images: Podman) -> Iterator[Callable[..., str]]:
    """`together("gateway", "--flag", ...)` starts a container that shares one network with those started before; returns its id."""
    started: list[str] = []

    def start(target: str, *arguments: str) -> str:
        network = f"container:{started[0]}" if started else "none"
        identity = images("run", "--detach", *CONFINED, "--network", network, f"lockstep-{target}:{TAG}", *arguments).strip()
        started.append(identity)
        return identity

    yield start
    for identity in reversed(started):
        images("rm", "--force", "--time", "1", identity)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_nobody_and_tells_its_version(images: Podman, target: str) -> None:
    assert images("run", "--rm", *CONFINED, "--network=none", f"lockstep-{target}:{TAG}", "--version").endswith("0.1.0\n")
    inspected = json.loads(images("image", "inspect", f"lockstep-{target}:{TAG}"))[0]
    assert inspected["Config"]["User"] == "10001:10001"
    assert "Lockstep" in inspected["Config"]["Labels"]["org.opencontainers.image.title"]


@pytest.mark.parametrize("target", ["gateway", "scheduler"])
def test_an_image_without_torch_stays_small(images: Podman, target: str, record_property: Callable[[str, object], None]) -> None:
    added = images.size(f"lockstep-{target}:{TAG}") - images.size(BASE)
    record_property("added_bytes", added)
    assert added <= MOST_ADDED_BYTES
    missing = "import importlib.util as u; print([n for n in ('torch', 'triton') if u.find_spec(n)])"
    assert images("run", "--rm", "--network=none", "--entrypoint=python3", f"lockstep-{target}:{TAG}", "-c", missing).strip() == "[]"


@pytest.mark.timeout(300)
def test_the_containers_answer_together(images: Podman, together: Callable[..., str]) -> None:
    model = "/opt/lockstep/models/SmolLM2-135M-Instruct"
    worker = together("worker-cpu", "--model", model, "--kv-cache-memory-bytes", str(64 << 20))
    scheduler = together("scheduler", "--worker", "127.0.0.1:7200")
    gateway = together("gateway", "--served-model-name", "demo")
    probe = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9100/readyz', timeout=5)"
    deadline = time.monotonic() + 200
    while subprocess.run(["podman", "exec", gateway, "python3", "-c", probe], env=images.env, capture_output=True).returncode:
        logs = "".join(images("logs", "--tail=20", each, check=False) for each in (worker, scheduler, gateway))
        assert time.monotonic() < deadline, logs
    assert "Paris" in images("exec", gateway, "python3", "-c", ASK)
    for each in (gateway, scheduler, worker):  # PID 1 ends by the signal, not by waiting out the grace period
        images("stop", "--time", "60", each)
        state = json.loads(images("inspect", each))[0]["State"]
        assert state["ExitCode"] == 0, images("logs", "--tail=20", each, check=False)
