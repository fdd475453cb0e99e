"""A release of the chart of the working tree on whatever cluster KUBECONFIG names, with the images that its nodes hold."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.ports import port_of, reserve
from tests.processes import eventually

CHART = Path(__file__).parents[2] / "helm/lockstep"
INSTALL_S = 600.0
PARTS = "app.kubernetes.io/part-of=lockstep"
Object = dict[str, Any]

# So that all fit, and a pod more of each during a roll-out, into one small node while the other one is drained.
SMALL: Object = {
    f"{component}__resources": {"requests": {"cpu": cpu, "memory": memory}}
    for component, cpu, memory in (("gateway", "100m", "256Mi"), ("scheduler", "100m", "128Mi"), ("worker", "400m", "1Gi"))
}
COMPONENTS = {"gateway", "scheduler", "worker-cpu"}
IMAGE = re.compile(r"(?:(?P<registry>.+)/)?lockstep-(?P<component>" + "|".join(sorted(COMPONENTS)) + r"):(?P<tag>[\w.-]+)")


def run(*command: str, timeout: float = 120.0, check: bool = True, stdin: str = "") -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, input=stdin)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


class Release:
    """An installed chart."""

    name = "lockstep"

    def __init__(self, namespace: str, images: Object) -> None:
        self.namespace = namespace
        self.images = images

    def image(self, component: str) -> str:
        registry = f"{self.images['registry']}/" if self.images["registry"] else ""
        return f"{registry}lockstep-{component}:{self.images['tag']}"

    def helm(self, *arguments: str, timeout: float = INSTALL_S + 60) -> str:
        return run("helm", *arguments, "--namespace", self.namespace, timeout=timeout)

    def kubectl(self, *arguments: str, timeout: float = 120.0, check: bool = True) -> str:
        return run("kubectl", "--namespace", self.namespace, *arguments, timeout=timeout, check=check)

    def deploy(self, *, force: bool = False, **values: Any) -> None:
        """`helm upgrade --install`; values by dotted names with `__`: `gateway__replicas=2`. Returns when all pods are ready.

        force: also what an autoscaler has set, which Helm 3 does unasked.
        """
        settings = {"image": self.images, "worker__mode": "cpu", "worker__settings__kv_cache_memory_bytes": 64 << 20, **SMALL, **values}
        flags = [flag for name, value in settings.items() for flag in ("--set-json", f"{name.replace('__', '.')}={json.dumps(value)}")]
        if force and not run("helm", "version", "--short").startswith("v3"):
            flags.append("--force-conflicts")
        self.helm("upgrade", "--install", self.name, str(CHART), *flags, "--wait", "--timeout", f"{INSTALL_S:.0f}s")

    def uninstall(self) -> None:
        """Returns when no pod is left that the next installation could take for its own."""
        self.helm("uninstall", self.name, "--wait")
        eventually(lambda: not self.objects("pods", PARTS), INSTALL_S)

    def trials(self) -> int:
        """Runs `helm test`; how many trials have passed. Fails with the words of those that did not."""
        try:
            told = self.helm("test", self.name, "--timeout", "5m")
        except AssertionError as error:
            words = self.kubectl("logs", "--selector=app.kubernetes.io/component=test", "--prefix", "--tail=20", check=False)
            raise AssertionError(f"{error}\n{words}") from error
        return len(re.findall(r"Phase: +Succeeded", told))

    def objects(self, kind: str, selector: str = "") -> list[Object]:
        found: list[Object] = json.loads(self.kubectl("get", kind, "--selector", selector, "--output", "json"))["items"]
        return found

    def pods(self, component: str) -> list[str]:
        """Names of the component's pods that are not about to go."""
        found = self.objects("pods", f"app.kubernetes.io/component={component}")
        return sorted(pod["metadata"]["name"] for pod in found if "deletionTimestamp" not in pod["metadata"])

    def all_there(self) -> None:
        """Waits until every workload has all its pods, ready and of its newest template, and no other pod is left."""

        def settled() -> bool:
            workloads = self.objects("deployments,statefulsets", PARTS)
            return all(
                status.get("observedGeneration") == workload["metadata"]["generation"]
                and {status.get(name, 0) for name in ("replicas", "readyReplicas", "updatedReplicas")} == {workload["spec"]["replicas"]}
                for workload in workloads
                for status in (workload["status"],)
            ) and len(self.objects("pods", PARTS)) == sum(workload["spec"]["replicas"] for workload in workloads)

        eventually(settled, INSTALL_S)

    def leader(self) -> tuple[str, int]:
        """Name of the scheduler's pod that the lease names, and its epoch."""
        lease = json.loads(self.kubectl("get", "lease", "lockstep-scheduler", "--output", "json"))
        annotations = lease["metadata"]["annotations"]
        host, _, _ = annotations["lockstep/address"].rpartition(":")
        pods = {
            pod["status"].get("podIP"): pod["metadata"]["name"] for pod in self.objects("pods", "app.kubernetes.io/component=scheduler")
        }
        return pods.get(host.strip("[]"), ""), int(annotations["lockstep/epoch"])

    @contextlib.contextmanager
    def forwarded(self, target: str = "service/lockstep-gateway", port: int = 80) -> Iterator[httpx.Client]:
        """A client of the gateway, through `kubectl port-forward`."""
        reservation = reserve("127.0.0.1")
        local = port_of(reservation)
        forward = subprocess.Popen(
            ["kubectl", "--namespace", self.namespace, "port-forward", target, f"{local}:{port}"], stdout=subprocess.DEVNULL
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{local}", timeout=120.0) as client:

                def answers() -> bool:
                    with contextlib.suppress(httpx.TransportError):
                        return client.get("/health").status_code < 500
                    return False

                eventually(answers, 60.0)
                yield client
        finally:
            forward.terminate()
            forward.wait(10)
            reservation.close()


def images_of_the_nodes() -> Object:
    """Values of `image` under which most nodes that take pods hold all images, or those of LOCKSTEP_IMAGE_TAG."""
    nodes = json.loads(run("kubectl", "get", "nodes", "--output", "json"))["items"]
    takes_pods = [node for node in nodes if not any(taint["effect"] != "PreferNoSchedule" for taint in node["spec"].get("taints", []))]
    names = [{name for image in node["status"].get("images", []) for name in image.get("names") or []} for node in takes_pods]
    held: dict[tuple[str, str], set[tuple[int, str]]] = defaultdict(set)  # by registry and tag: which node has the image of which component
    for number, each in enumerate(names):
        for name in each:
            if match := IMAGE.fullmatch(name):
                held[match["registry"] or "", match["tag"]].add((number, match["component"]))
    wanted = os.environ.get("LOCKSTEP_IMAGE_TAG")
    whole = [key for key in sorted(held) if {component for _, component in held[key]} == COMPONENTS and wanted in (None, key[1])]
    if not whole:
        there = sorted(name for each in names for name in each if "lockstep" in name)
        pytest.fail(f"load images of one tag into the nodes first, {wanted or 'any'}, of lockstep-{sorted(COMPONENTS)}; there are {there}")
    registry, tag = max(whole, key=lambda key: len(held[key]))
    return {"registry": registry, "tag": tag, "pullPolicy": "Never"}


@pytest.fixture(scope="session")
def release() -> Iterator[Release]:
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG is not set: these tests need a cluster whose nodes hold the images")
    for tool in ("helm", "kubectl"):
        if shutil.which(tool) is None:
            pytest.fail(f"{tool} is not on the PATH")
    namespace = f"lockstep-{uuid.uuid4().hex[:8]}"
    run("kubectl", "create", "namespace", namespace)
    run("kubectl", "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    try:
        yield Release(namespace, images_of_the_nodes())
    finally:
        run("kubectl", "delete", "namespace", namespace, "--wait=false")
