"""Schedulers that find their workers and each other through a cluster's API server: real processes, and an API server of ours. Engines are
simulated: whether tokens are right after a move depends on all that came before them, as in tests/e2e/test_recovery.py.

One stack for all: two workers, two schedulers of which one waits, a gateway. Each test leaves it as it found it.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api_server import Cluster, endpoint_slice
from tests.e2e.stack import Service, Stack
from tests.e2e.test_recovery import WITHIN_S, Streams, serving, standby
from tests.processes import eventually

pytestmark = pytest.mark.timeout(300)  # leases last as long as in earnest

NAMESPACE, SERVICE, LEASE = "models", "lockstep-worker", "lockstep-scheduler"
TAKEN_OVER_S = 5.0  # from the end of a leader to its successor's first group: 3 s of the lease, the rest for all else
SIMULATED = ("--simulated-gpu", "a100", "--simulated-model", "8b")  # 10 ms a token
DISCOVERY = (f"--leadership=lease:{NAMESPACE}/{LEASE}", f"--worker-service={NAMESPACE}/{SERVICE}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, weightless_model: Path, cluster: Cluster) -> Iterator[Stack]:
    with ListedStack(cluster, tmp_path_factory.mktemp("kubernetes"), weightless_model) as stack:
        eventually(lambda: stack.groups_ready() == 2, WITHIN_S)
        yield stack


class ListedStack(Stack):
    """Its workers' addresses are told to the cluster alone."""

    def __init__(self, cluster: Cluster, folder: Path, model: Path) -> None:
        super().__init__(
            folder,
            model=model,
            workers=2,
            schedulers=2,
            engine="simulated",
            worker_args=(*SIMULATED, "--max-num-seqs", "8", "--num-pages", "1000"),
            discovery=DISCOVERY,
            environment={"KUBECONFIG": str(cluster.server.kubeconfig(folder))},
        )
        self._cluster = cluster

    def _start(self, name: str, *arguments: str, number: int = 0) -> Service:
        service = super()._start(name, *arguments, number=number)
        if name == "worker":
            tell(self._cluster, service)
        return service


def tell(cluster: Cluster, worker: Service, *, terminating: bool = False) -> None:
    """What the cluster says of the worker's pod; a slice has one port, so each pod has its own."""
    host, _, port = worker.address.partition(":")
    found = endpoint_slice(SERVICE, {host: terminating}, int(port), name=f"{SERVICE}-{port}")
    cluster.call(cluster.server.put("endpointslices", NAMESPACE, found))


def forget(cluster: Cluster, worker: Service) -> None:
    cluster.call(cluster.server.delete("endpointslices", NAMESPACE, f"{SERVICE}-{worker.ports['grpc']}"))


@pytest.fixture(scope="module")
def expected(stack: Stack) -> list[str]:
    """What comes when nothing breaks."""
    return Streams(stack).end()


@pytest.fixture(autouse=True)
def all_is_there(stack: Stack, cluster: Cluster) -> Iterator[None]:
    """After each test."""
    yield
    for service in (*stack.workers, *stack.schedulers):
        if service.ended:
            service.start_again()
    for worker in stack.workers:
        tell(cluster, worker)
    eventually(lambda: stack.groups_ready() == 2, WITHIN_S)
    eventually(lambda: sum(stack.running()) == 0)


def test_a_new_leader_serves_within_5_s_and_streams_go_on(stack: Stack, expected: list[str]) -> None:
    leader, waiting = stack.leader, standby(stack)
    streams = Streams(stack).begun()
    leader.kill()
    eventually(lambda: waiting.metrics().get("lockstep_scheduler_group_ready"), TAKEN_OVER_S)
    assert streams.end() == expected
    assert stack.leader is waiting


def test_an_old_leader_that_wakes_up_is_refused_and_steps_down(stack: Stack, cluster: Cluster, expected: list[str]) -> None:
    leader, waiting = stack.leader, standby(stack)
    streams = Streams(stack).begun()
    leader.process.send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: waiting.metrics().get("lockstep_num_requests_running"), WITHIN_S)
        cluster.call(cluster.server.close())  # nobody tells the old one that it does not lead, but the workers
    finally:
        leader.process.send_signal(signal.SIGCONT)
    eventually(lambda: "cannot be taken without the API server" in leader.log, WITHIN_S)
    assert streams.end() == expected
    assert waiting.metrics()["lockstep_scheduler_group_ready"] == 2
    assert not leader.ended
    cluster.call(cluster.server.open())
    eventually(lambda: leader.ended, WITHIN_S)
    assert leader.process.returncode == 1
    assert "leads now, with epoch" in leader.log.splitlines()[-1]


def test_the_api_server_goes_away_and_nothing_changes(stack: Stack, cluster: Cluster, expected: list[str]) -> None:
    leader = stack.leader
    before = len(leader.log)
    moved = leader.metrics()["lockstep_scheduler_requests_moved_total"]
    cluster.call(cluster.server.close())
    try:
        assert Streams(stack).end() == expected
        eventually(lambda: "the lease cannot be renewed, we lead on" in leader.log[before:])
        eventually(lambda: "the API server cannot be asked for the workers" in leader.log[before:])
        assert stack.leader is leader
        assert stack.groups_ready() == 2
    finally:
        cluster.call(cluster.server.open())
    eventually(lambda: "the lease is renewed again" in leader.log[before:])
    eventually(lambda: "the API server answers again" in leader.log[before:])
    assert leader.metrics()["lockstep_scheduler_requests_moved_total"] == moved


def test_a_pod_that_terminates_gets_no_requests_and_its_own_move(stack: Stack, cluster: Cluster, expected: list[str]) -> None:
    lost = stack.leader.metrics(cause="lost")["lockstep_scheduler_requests_moved_total"]
    streams = Streams(stack).begun()
    leaving = serving(stack)
    number = stack.workers.index(leaving)
    tell(cluster, leaving, terminating=True)  # of which the worker itself knows nothing yet
    eventually(lambda: not stack.running()[number])
    assert streams.end() == expected
    assert Streams(stack).end() == expected
    assert stack.groups_ready() == 1
    assert stack.leader.metrics(cause="lost")["lockstep_scheduler_requests_moved_total"] == lost
    forget(cluster, leaving)
    tell(cluster, leaving)  # another pod, at the same address
    eventually(lambda: stack.groups_ready() == 2)


def test_an_address_that_is_not_listed_any_more_is_no_reason_to_cut_a_stream(stack: Stack, cluster: Cluster, expected: list[str]) -> None:
    leader = stack.leader
    moved = leader.metrics()["lockstep_scheduler_requests_moved_total"]
    streams = Streams(stack).begun()
    for worker in stack.workers:
        forget(cluster, worker)
    assert streams.end() == expected
    assert leader.metrics()["lockstep_scheduler_requests_moved_total"] == moved
    stack.worker.kill()
    eventually(lambda: stack.groups_ready() == 1)
    stack.worker.start_again()
    tell(cluster, stack.worker)
    eventually(lambda: stack.groups_ready() == 2, WITHIN_S)


def test_a_worker_that_appears_is_used(stack: Stack, cluster: Cluster) -> None:
    old, other = stack.workers
    old.terminate()
    tell(cluster, old, terminating=True)
    eventually(lambda: old.ended, WITHIN_S)
    forget(cluster, old)
    eventually(lambda: stack.groups_ready() == 1)
    old.start_again()
    tell(cluster, old)
    eventually(lambda: stack.groups_ready() == 2, WITHIN_S)
    other.kill()
    assert stack.complete("hello", max_tokens=3)
