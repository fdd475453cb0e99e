"""The images, really built from a local base and run together as the chart runs them: as nobody, on a read-only root file system."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system.conftest import copy_sources, execute, require_space
from tests.system.images.podman import LABEL, Podman, cleared

BASE = "localhost/lockstep-test-base:latest"
TAG = "test"
TARGETS = ("gateway", "scheduler", "worker-cpu")
MOST_ADDED_BYTES = 350 << 20  # by gateway and scheduler, to their base
STORAGE_BYTES, FOLDER_BYTES = 12_000_000_000, 2_000_000_000  # 11 GB were seen to be in use at once
READY_S = 400
pytestmark = pytest.mark.timeout(1400)  # the first test to run has the images built
CONFINED = ("--read-only", "--tmpfs=/tmp:mode=1777", "--user=10001:10001", "--cap-drop=all", "--security-opt=no-new-privileges")
PODMAN_CONFIG = """
[engine]
runtime = "runc"
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=20000:20000"]
"""
AWAIT_READY = """
import time, urllib.request
while True:
    try:
        urllib.request.urlopen("http://127.0.0.1:9100/readyz", timeout=5)
        break
    except OSError:
        time.sleep(0.5)
"""
ASK = """
import json, urllib.request
body = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 16}
headers = {"Content-Type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode(), headers)
print(json.load(urllib.request.urlopen(request, timeout=200))["choices"][0]["message"]["content"])
"""


@pytest.fixture(scope="module")
def podman(debian: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    debian("podman", "runc", "debootstrap", "make")
    folder = tmp_path_factory.mktemp("podman")
    (folder / "containers.conf").write_text(PODMAN_CONFIG)
    podman = Podman({**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")})
    with cleared(podman):
        require_space(Path(podman("info", "--format", "{{.Store.GraphRoot}}").strip()), STORAGE_BYTES, "the build of the images")
        require_space(folder, FOLDER_BYTES, "what goes into the images")
        yield podman


@pytest.fixture(scope="module")
def images(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> Podman:
    """The images are there."""
    folder = tmp_path_factory.mktemp("build")
    try:
        build(podman, folder)
    finally:
        shutil.rmtree(folder)
    return podman


def build(podman: Podman, folder: Path) -> None:
    """The base is a Debian of this machine's release, so that the wheels of this Python fit."""
    root, archive, sources = folder / "root", folder / "base.tar", folder / "sources"
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)["VERSION_CODENAME"]
    bootstrap = ["debootstrap", "--variant=minbase", "--include=python3,python3-venv", release, str(root)]
    execute(["unshare", "--mount", *bootstrap], 600)  # what it mounts goes with it, however it ends
    python = subprocess.run(["chroot", root, "python3", "--version"], check=True, capture_output=True, text=True).stdout
    version = ".".join(python.split()[1].split(".")[:2])
    execute(["tar", "-C", root, "-cf", archive, "."], 200)
    podman("import", "--change", f"LABEL {LABEL}", str(archive), BASE)
    copy_sources(sources)
    make: list[str | Path] = ["make", "-C", sources, f"PYTHON={sys.executable}", f"IMAGE_PYTHON={version}", "ENGINE=podman", f"TAG={TAG}"]
    execute([*make, "wheels"], 600)
    execute(
        [*make, "images", f"BASE={BASE}", f"WORKER_BASE={BASE}", "BUILD_FLAGS=--pull=never", f"TARGETS={' '.join(TARGETS)}"],
        900,
        podman.env,
    )


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


def test_the_containers_answer_together(images: Podman, together: Callable[..., str]) -> None:
    model = "/opt/lockstep/models/SmolLM2-135M-Instruct"
    worker = together("worker-cpu", "--model", model, "--kv-cache-memory-bytes", str(64 << 20))
    scheduler = together("scheduler", "--worker", "127.0.0.1:7200")
    gateway = together("gateway", "--served-model-name", "demo")
    try:
        images("exec", gateway, "python3", "-c", AWAIT_READY, timeout=READY_S)
    except subprocess.TimeoutExpired:
        pytest.fail("".join(images("logs", "--tail=20", each, check=False) for each in (worker, scheduler, gateway)))
    assert "Paris" in images("exec", gateway, "python3", "-c", ASK)
    for each in (gateway, scheduler, worker):  # PID 1 ends by the signal, not by waiting out the grace period
        images("stop", "--time", "60", each)
        state = json.loads(images("inspect", each))[0]["State"]
        assert state["ExitCode"] == 0, images("logs", "--tail=20", each, check=False)
