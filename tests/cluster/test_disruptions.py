"""Streams go on, token by token, while pods, leaders and nodes come and go: 8 at a time, of the real engine in its deterministic mode."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.client import Client
from tests.cluster.conftest import PARTS, Object, Release, run
from tests.processes import eventually

pytestmark = pytest.mark.timeout(1800)

SOON_S, LOADED_S = 30.0, 300.0


def spread(component: str) -> list[Object]:
    """Over nodes, so that draining one leaves somebody."""
    labels = {"app.kubernetes.io/component": component}
    on = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }
    return [on]


VALUES: dict[str, Any] = {
    "gateway__replicas": 2,
    "gateway__drainSeconds": 300,  # longer than a stream takes, on nodes that others keep busy too
    "gateway__topologySpreadConstraints": spread("gateway"),
    "scheduler__replicas": 2,
    "scheduler__topologySpreadConstraints": spread("scheduler"),
    "worker__replicas": 2,
    "worker__settings__deterministic": True,
    "worker__settings__kv_cache_memory_bytes": 256 << 20,  # one group has room for all
    "worker__topologySpreadConstraints": spread("worker"),
}


@pytest.fixture(scope="module")
def running(release: Release) -> Iterator[Release]:
    release.deploy(**VALUES)
    yield release
    release.uninstall()


@pytest.fixture(scope="module")
def client(running: Release) -> Iterator[Client]:
    client = Client(running)
    yield client
    client.delete()


@pytest.fixture(scope="module")
def expected(client: Client) -> list[str]:
    """What comes when nothing happens."""
    return client.once()


@pytest.fixture
def unbroken(running: Release, client: Client, expected: list[str]) -> Iterator[None]:
    """Around a test: streams that run through it all, and are as when nothing happens; afterwards all pods are there again."""
    with client.streams() as streams:
        yield
        running.all_there()
    for texts, text in zip(streams.texts, expected, strict=True):
        assert texts
        assert set(texts) == {text}


@pytest.mark.usefixtures("unbroken")
def test_an_upgrade_that_replaces_every_pod(running: Release) -> None:
    before = {component: running.pods(component) for component in ("gateway", "scheduler")}
    workers = uids(running, "worker")
    rolled: dict[str, Any] = {f"{component}__podAnnotations": {"rolled": "yes"} for component in ("gateway", "scheduler", "worker")}
    running.deploy(**VALUES, **rolled)
    for component, pods in before.items():
        assert not set(pods) & set(running.pods(component))
    assert not workers & uids(running, "worker")


@pytest.mark.usefixtures("unbroken")
@pytest.mark.parametrize("how", [(), ("--grace-period=0", "--force")], ids=["in good order", "at once"])
def test_a_worker_is_deleted(running: Release, how: tuple[str, ...]) -> None:
    before = uids(running, "worker")
    running.kubectl("delete", "pod", running.pods("worker")[0], "--wait=false", *how)
    eventually(lambda: uids(running, "worker") - before, LOADED_S)


@pytest.mark.usefixtures("unbroken")
@pytest.mark.parametrize("how", [(), ("--grace-period=0", "--force")], ids=["in good order", "at once"])
def test_the_leading_scheduler_is_deleted(running: Release, how: tuple[str, ...]) -> None:
    leader, epoch = running.leader()
    assert leader
    running.kubectl("delete", "pod", leader, "--wait=false", *how)
    eventually(lambda: running.leader()[0] not in ("", leader), SOON_S)
    assert running.leader()[1] > epoch


@pytest.mark.usefixtures("unbroken")
def test_a_gateway_is_deleted(running: Release) -> None:
    gateway = running.pods("gateway")[0]
    running.kubectl("delete", "pod", gateway, "--wait=false")
    eventually(lambda: gateway not in running.pods("gateway"), SOON_S)


@pytest.mark.usefixtures("unbroken")
def test_a_node_is_drained(running: Release, client: Client) -> None:
    pods = running.objects("pods", PARTS)
    nodes = {pod["spec"]["nodeName"] for pod in pods if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "worker"}
    if not nodes - {client.node}:
        pytest.fail(f"all workers are on the client's node {client.node}: a second node that takes pods is needed")
    node = sorted(nodes - {client.node})[0]
    options = (f"--pod-selector={PARTS}", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s")
    try:
        run("kubectl", "drain", node, *options, timeout=330)
        left = running.objects("pods", PARTS)
        assert not [pod for pod in left if pod["spec"].get("nodeName") == node and "deletionTimestamp" not in pod["metadata"]]
    finally:
        run("kubectl", "uncordon", node)


def test_the_lease_names_the_leader_and_is_renewed(running: Release) -> None:
    def lease() -> Object:
        found: Object = json.loads(running.kubectl("get", "lease", "lockstep-scheduler", "--output", "json"))
        return found

    assert running.leader()[0] in running.pods("scheduler")
    before = lease()
    assert before["spec"]["holderIdentity"] == before["metadata"]["annotations"]["lockstep/address"]
    eventually(lambda: lease()["spec"]["renewTime"] > before["spec"]["renewTime"], SOON_S)
    assert lease()["spec"]["leaseTransitions"] == before["spec"]["leaseTransitions"]
    who = f"system:serviceaccount:{running.namespace}:lockstep-scheduler"
    for verb, kind, allowed in (("list", "endpointslices", True), ("list", "secrets", False), ("delete", "pods", False)):
        answer = running.kubectl("auth", "can-i", verb, kind, f"--as={who}", check=False)
        assert answer.startswith("yes" if allowed else "no"), (verb, kind)


def test_the_trial_that_deletes_a_worker_passes(running: Release) -> None:
    running.deploy(**VALUES, tests__moveEnabled=True)
    before = uids(running, "worker")
    assert running.trials() == 4
    assert uids(running, "worker") - before
    running.all_there()


def test_gateways_come_with_the_load_and_answer(running: Release, client: Client, served: Callable[[str], bool]) -> None:
    if not served("/apis/metrics.k8s.io/v1beta1/nodes"):
        pytest.skip("the cluster serves no metrics.k8s.io: without metrics-server nothing scales by CPU")
    scaling = {"enabled": True, "minReplicas": 1, "maxReplicas": 3, "targetCPUUtilizationPercentage": 10}
    running.deploy(**VALUES, gateway__autoscaling=scaling, gateway__resources={"requests": {"cpu": "10m", "memory": "512Mi"}})
    try:
        with client.streams() as streams:
            eventually(lambda: autoscaler(running, "lockstep-gateway").get("desiredReplicas", 0) > 1, LOADED_S)
            eventually(lambda: len(running.pods("gateway")) > 1, LOADED_S)
        assert all(streams.texts)
    finally:
        running.deploy(force=True, **VALUES)


def test_workers_scale_where_an_adapter_serves_what_runs(running: Release, client: Client, served: Callable[[str], bool]) -> None:
    metric = f"/apis/custom.metrics.k8s.io/v1beta1/namespaces/{running.namespace}/metrics/lockstep_num_requests_running"
    if not served(metric):
        pytest.skip("no adapter serves lockstep_num_requests_running at custom.metrics.k8s.io: its rules are in docs/operations.md")
    scaling = {"enabled": True, "type": "hpa", "minReplicas": 2, "maxReplicas": 3, "runningRequests": 2}
    running.deploy(**VALUES, worker__autoscaling=scaling)
    try:
        with client.streams() as streams:
            eventually(lambda: autoscaler(running, "lockstep-worker").get("desiredReplicas", 0) > 2, LOADED_S)
        assert all(streams.texts)
    finally:
        running.deploy(force=True, **VALUES)


@pytest.fixture
def served() -> Callable[[str], bool]:
    """Whether the cluster's API has an answer at this path."""
    return lambda path: bool(run("kubectl", "get", "--raw", path, check=False))


def uids(release: Release, component: str) -> set[str]:
    """A pod of a StatefulSet that comes again has its name."""
    found = release.objects("pods", f"app.kubernetes.io/component={component}")
    return {pod["metadata"]["uid"] for pod in found if "deletionTimestamp" not in pod["metadata"]}


def autoscaler(release: Release, name: str) -> Object:
    status: Object = json.loads(release.kubectl("get", "hpa", name, "--output", "json"))["status"]
    return status
