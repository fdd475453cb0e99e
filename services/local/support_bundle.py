"""`lockstep support-bundle`: what somebody who looks for a fault would ask for, in one archive, without secrets.

Of a stack on this machine, as its run file tells, or of a namespace, through kubectl: settings, metrics, probes, the last decisions, logs,
NCCL's environment, the topology of GPUs. What cannot be had is a line in `problems.txt`, never the end of it.
"""

import importlib.metadata
import io
import json
import logging
import os
import platform
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from services.local.redaction import Redaction
from shared.errors import ConfigError, LockstepError

logger = logging.getLogger(__name__)

PAGES = ("livez", "readyz", "metrics", "debug/requests", "debug/groups")
ADMIN_PORTS = {"gateway": 9100, "scheduler": 9101, "worker": 9102}  # in a pod
PAGE_S, COMMAND_S = 10.0, 60.0
MAX_BYTES = 8 << 20  # of one file; of logs, the last ones
LOG_LINES = 20_000
PACKAGES = ("lockstep", "torch", "triton", "transformers", "grpcio", "protobuf", "fastapi", "uvicorn", "numpy")
VARIABLES = ("LOCKSTEP_", "NCCL_", "GLOO_", "CUDA_", "NVIDIA_", "TORCH_", "TRITON_", "OMP_", "LWS_", "HF_")
KINDS = (
    *("pods", "deployments", "statefulsets", "controllerrevisions", "services", "endpointslices", "leases", "events"),
    *("networkpolicies", "horizontalpodautoscalers", "poddisruptionbudgets", "persistentvolumeclaims", "resourcequotas"),
)  # never secrets, and no config maps, in which users keep them all the same
TOPOLOGY: tuple[tuple[str, ...], ...] = ("nvidia-smi", "topo", "-m"), ("nvidia-smi",)
# In a pod there is nothing but Python to ask its admin port with.
FETCH = "import sys, urllib.request as r, urllib.error as e\ntry: a = r.urlopen(sys.argv[1], timeout=10)\nexcept e.HTTPError as x: a = x\n"
FETCH += "sys.stdout.buffer.write(a.read())"


class NotHad(LockstepError):
    """Something that the bundle goes without."""


class Bundle:
    """The archive while it is being filled; all that goes in is redacted here."""

    def __init__(self, archive: tarfile.TarFile, root: str, redaction: Redaction) -> None:
        self.names: list[str] = []
        self._archive, self._root, self._redaction = archive, root, redaction
        self._problems: list[str] = []

    def text(self, name: str, text: str) -> None:
        content = self._redaction.text(text).encode()[-MAX_BYTES:]
        entry = tarfile.TarInfo(f"{self._root}/{name}")
        entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
        self._archive.addfile(entry, io.BytesIO(content))
        self.names.append(name)

    def json(self, name: str, found: Any) -> None:
        self.text(name, json.dumps(self._redaction.json(found), indent=1) + "\n")

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """What fails within is told, and gone without."""
        try:
            yield
        except (NotHad, OSError, ValueError) as error:
            self._problems.append(f"{what}: {' '.join(str(error).split())[:500]}")

    def finish(self) -> None:
        self.text("problems.txt", "".join(f"{each}\n" for each in self._problems) or "none\n")


def make(output: Path, folder: Path, namespace: str | None, release: str | None) -> list[str]:
    """Writes the archive `output`; returns what it holds. Raises ConfigError when there is nothing to look at.

    folder: where local stacks keep their run files. namespace: of an installation in a cluster, instead. release: of its installations.
    """
    run_files = sorted(folder.glob("run-*.json")) if namespace is None else []
    logs = sorted(folder.glob("logs-*/*.log")) if namespace is None else []
    if namespace is None and not (run_files or logs):
        raise ConfigError(f"no stack has run in {folder.absolute()}: go to the folder of `lockstep serve`, or name a --namespace")
    if namespace is not None and shutil.which("kubectl") is None:
        raise ConfigError("kubectl is not on the PATH: a namespace is looked at through it")
    try:
        with output.open("xb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            output.chmod(0o600)
            bundle = Bundle(archive, output.name.partition(".")[0], Redaction(os.environ))
            _machine(bundle)
            if namespace is None:
                _local(bundle, run_files, logs)
            else:
                _cluster(bundle, namespace, release)
            bundle.finish()
    except FileExistsError as error:
        raise ConfigError(f"{output} exists: name another --output") from error
    return bundle.names


def _machine(bundle: Bundle) -> None:
    versions = {}
    for package in PACKAGES:
        with bundle.trying(f"version of {package}"):
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError as error:
                raise NotHad("it is not installed") from error
    bundle.json(
        "machine.json",
        {
            "platform": platform.platform(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "versions": versions,
            "environment": _ours(os.environ),
        },
    )


def _ours(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in sorted(environment.items()) if name.startswith(VARIABLES)}


def _local(bundle: Bundle, run_files: Sequence[Path], logs: Sequence[Path]) -> None:
    for path in run_files:
        with bundle.trying(str(path)):
            run = json.loads(path.read_text())
            bundle.json(path.name, run)
            for service, port in run["admin_ports"].items():
                for page in PAGES:
                    with bundle.trying(f"{service}: /{page}"):
                        bundle.text(f"{path.stem}/{service}/{page.replace('/', '-')}.txt", _page(f"http://127.0.0.1:{port}/{page}"))
            for name, pid in run["pids"].items():
                with bundle.trying(f"process {name}"):
                    process = Path(f"/proc/{int(pid)}")
                    command = process.joinpath("cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                    status = process.joinpath("status").read_text()
                    bundle.text(f"{path.stem}/{name}/process.txt", f"{command}\n{status}")
    for path in logs:
        with bundle.trying(str(path)), path.open("rb") as file:
            file.seek(max(path.stat().st_size - MAX_BYTES, 0))
            bundle.text(f"{path.parent.name}/{path.name}", file.read(MAX_BYTES).decode(errors="replace"))
    for asking in TOPOLOGY:
        with bundle.trying(" ".join(asking)):
            bundle.text(f"{'-'.join(asking)}.txt", _output(asking))


def _cluster(bundle: Bundle, namespace: str, release: str | None) -> None:
    kubectl = ("kubectl", "--namespace", namespace, "--request-timeout=30s")
    selector = "app.kubernetes.io/part-of=lockstep" + (f",app.kubernetes.io/instance={release}" if release else "")
    for kind in KINDS:
        labels = () if kind in ("events", "leases", "endpointslices", "resourcequotas", "controllerrevisions") else ("--selector", selector)
        with bundle.trying(kind):
            bundle.json(f"{kind}.json", _lean(json.loads(_output((*kubectl, "get", kind, *labels, "--output=json")))))
    with bundle.trying("nodes"):
        bundle.json("nodes.json", _lean(json.loads(_output(("kubectl", "--request-timeout=30s", "get", "nodes", "--output=json")))))
    pods = []
    with bundle.trying("pods"):
        pods = json.loads(_output((*kubectl, "get", "pods", "--selector", selector, "--output=json")))["items"]
    for pod in pods:
        _pod(bundle, kubectl, pod["metadata"]["name"], pod["metadata"].get("labels", {}).get("app.kubernetes.io/component", ""))


def _pod(bundle: Bundle, kubectl: Sequence[str], name: str, component: str) -> None:
    with bundle.trying(f"{name}: description"):
        bundle.text(f"{name}/describe.txt", _output((*kubectl, "describe", "pod", name)))
    for which in ("", "--previous"):
        command = (*kubectl, "logs", name, "--all-containers", "--timestamps", f"--tail={LOG_LINES}", *filter(None, (which,)))
        with bundle.trying(f"{name}: logs {which}"):
            bundle.text(f"{name}/logs{which.replace('--', '-')}.txt", _output(command))
    if component not in ADMIN_PORTS:
        return
    inside = (*kubectl, "exec", name, f"--container={component}", "--")
    for page in PAGES:
        with bundle.trying(f"{name}: /{page}"):
            url = f"http://127.0.0.1:{ADMIN_PORTS[component]}/{page}"
            bundle.text(f"{name}/{page.replace('/', '-')}.txt", _output((*inside, "python3", "-c", FETCH, url)))
    with bundle.trying(f"{name}: environment"):
        lines = (line.partition("=") for line in _output((*inside, "env")).splitlines())
        bundle.json(f"{name}/environment.json", _ours({variable: value for variable, _, value in lines}))
    if component == "worker":
        for asking in TOPOLOGY:
            with bundle.trying(f"{name}: {' '.join(asking)}"):
                bundle.text(f"{name}/{'-'.join(asking)}.txt", _output((*inside, *asking)))


def _lean(found: Any) -> Any:
    """Without what says the same twice, or who wrote which field."""
    for item in found["items"]:
        item["metadata"].pop("managedFields", None)
        item["metadata"].get("annotations", {}).pop("kubectl.kubernetes.io/last-applied-configuration", None)
    return found


def _page(url: str) -> str:
    """The answer, whatever its status; `/readyz` tells why with a 503."""
    try:
        return httpx.get(url, timeout=PAGE_S, trust_env=False).text
    except httpx.HTTPError as error:
        raise NotHad(f"{url}: {error or type(error).__name__}") from error


def _output(command: Sequence[str]) -> str:
    """What a command prints. Raises NotHad when it fails or takes too long."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NotHad(f"no end within {COMMAND_S:g} s") from error
    if done.returncode:
        raise NotHad(f"status {done.returncode}: {done.stderr[-400:].decode(errors='replace')}")
    return done.stdout.decode(errors="replace")
