"""One archive with what somebody who looks for a fault asks for, and without secrets."""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from services.local.support_bundle import make
from shared.errors import ConfigError
from tests.services.local.launched import Launched

LOCKSTEP = Path(sys.executable).with_name("lockstep")
KUBECTL = """#!{python}
import json, os, sys
arguments = [each for each in sys.argv[1:] if not each.startswith("--request-timeout")]
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps(arguments), file=calls)
if "exec" in arguments and "nvidia-smi" in arguments:
    sys.exit("no such file: nvidia-smi")
if "exec" in arguments and "env" in arguments:
    print("HF_TOKEN=wonderland\\nNCCL_DEBUG=WARN\\nPATH=/bin")
elif "exec" in arguments:
    print("page", arguments[-1])
elif "logs" in arguments:
    print("downloading with hf_abcdefghijklmnop")
elif "get" in arguments and "pods" in arguments:
    env = [{{"name": "API_KEY", "value": "wonderland"}}, {{"name": "LOCKSTEP_WORKER_DTYPE", "value": "auto"}}]
    labels = {{"app.kubernetes.io/component": "worker"}}
    annotations = {{"kubectl.kubernetes.io/last-applied-configuration": "wonderland"}}
    metadata = {{"name": "w-0", "labels": labels, "managedFields": [1], "annotations": annotations}}
    print(json.dumps({{"items": [{{"metadata": metadata, "spec": {{"containers": [{{"env": env}}]}}}}]}}))
elif "get" in arguments:
    print(json.dumps({{"items": []}}))
else:
    print("Name: w-0")
"""


def unpacked(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as opened:
        found = {}
        for member in opened:
            file = opened.extractfile(member)
            assert file is not None
            found[member.name.partition("/")[2]] = file.read().decode()
        return found


def test_a_stack_of_this_machine(serve: Callable[..., Launched], tmp_path: Path) -> None:
    launched = serve()
    run = launched.ready()
    assert httpx.post(f"{run['url']}/v1/completions", json={"model": "tiny", "prompt": "a secret plan", "max_tokens": 3}).is_success
    archive = tmp_path / "bundle.tar.gz"
    environment = {**os.environ, "NCCL_DEBUG": "WARN", "HF_TOKEN": "wonderland"}
    command = [str(LOCKSTEP), "support-bundle", "--output", str(archive)]
    done = subprocess.run(command, cwd=launched.folder, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert archive.stat().st_mode & 0o077 == 0
    found = unpacked(archive)
    name = f"run-{run['ports']['gateway']}"
    assert {f"{name}/{service}/metrics.txt" for service in ("gateway", "scheduler", "worker")} <= found.keys()
    assert "lockstep_generation_tokens_total" in found[f"{name}/scheduler/metrics.txt"]
    assert json.loads(found[f"{name}/scheduler/debug-requests.txt"])
    assert json.loads(found[f"{name}/scheduler/debug-groups.txt"])["groups"]
    assert f"logs-{run['ports']['gateway']}/worker.log" in found
    assert "services.worker" in found[f"{name}/worker/process.txt"]
    machine = json.loads(found["machine.json"])
    assert machine["environment"]["NCCL_DEBUG"] == "WARN"
    assert machine["environment"]["HF_TOKEN"] == "(removed)"
    whole = "".join(found.values())
    assert "wonderland" not in whole
    assert "a secret plan" not in whole


def test_a_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL.format(python=sys.executable))
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    archive = tmp_path / "bundle.tar.gz"
    make(archive, tmp_path, "models", "lockstep")
    found = unpacked(archive)
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert not any("secret" in argument for call in calls for argument in call if call[2:3] == ["get"])
    assert "page http://127.0.0.1:9102/debug/groups" in found["w-0/debug-groups.txt"]
    assert json.loads(found["w-0/environment.json"]) == {"HF_TOKEN": "(removed)", "NCCL_DEBUG": "WARN"}
    assert "nvidia-smi" in found["problems.txt"]
    assert "LOCKSTEP_WORKER_DTYPE" in found["pods.json"]
    assert {"w-0/logs.txt", "w-0/logs-previous.txt", "w-0/describe.txt", "nodes.json", "leases.json"} <= found.keys()
    whole = "".join(found.values())
    assert "wonderland" not in whole
    assert "hf_abcdefghijklmnop" not in whole


def test_without_anything_to_look_at_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no stack has run in"):
        make(tmp_path / "bundle.tar.gz", tmp_path, None, None)
    assert not list(tmp_path.iterdir())
