"""Where ranks meet: settings, LeaderWorkerSet's variables, refusals."""

from pathlib import Path

import pytest

from services.worker.distributed.rendezvous import Rendezvous
from services.worker.settings import WorkerSettings
from shared.errors import ConfigError
from shared.settings import load

LEADER_WORKER_SET = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "lockstep-0.lockstep.default"}


def settings(*arguments: str) -> WorkerSettings:
    return load(WorkerSettings, "worker", ["--model", "/models/some", *arguments])


def test_leader_worker_set_tells_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LEADER_WORKER_SET.items():
        monkeypatch.setenv(name, value)
    read = settings("--tensor-parallel-size", "8")
    assert (read.nodes, read.node_index, read.leader_address) == (2, 1, "lockstep-0.lockstep.default")
    monkeypatch.setenv("LOCKSTEP_WORKER_LEADER_ADDRESS", "10.0.0.1")
    assert settings("--tensor-parallel-size", "8").leader_address == "10.0.0.1"
    assert settings("--tensor-parallel-size", "8", "--node-index", "0").node_index == 0


@pytest.mark.parametrize(
    "environment, arguments, message",
    [
        ({}, ("--nodes", "2", "--tensor-parallel-size", "2"), "nodes=2 need a leader_address"),
        ({}, ("--nodes", "2", "--tensor-parallel-size", "3", "--leader-address", "a"), "=3 ranks do not spread evenly over nodes=2"),
        (LEADER_WORKER_SET, ("--tensor-parallel-size", "2", "--node-index", "2"), "node_index=2 is not one of nodes=2"),
        (LEADER_WORKER_SET, ("--tensor-parallel-size", "2", "--engine", "simulated"), "nodes=2, but a simulated group has no ranks"),
        (LEADER_WORKER_SET, ("--tensor-parallel-size", "2", "--port", "0"), "node_index=1 needs the port of its leader"),
        ({"LWS_GROUP_SIZE": "two"}, (), "nodes: Input should be a valid integer.*'two'"),
        ({"LWS_WORKER_INDEX": "-1"}, (), "node_index: .*greater than or equal to 0"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], arguments: tuple[str, ...], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        settings(*arguments)


def test_ranks_are_numbered_node_by_node() -> None:
    places = [Rendezvous.over_nodes(8, 2, index, "leader", 29500) for index in range(2)]
    assert [place.url for place in places] == ["tcp://leader:29500"] * 2
    assert [rank for place in places for rank in place.ranks] == list(range(8))
    assert Rendezvous.over_nodes(2, 2, 0, "fd00::1", 1).url == "tcp://[fd00::1]:1"
    assert Rendezvous.on_one_node(4, Path("/tmp/x")) == Rendezvous("file:///tmp/x/rendezvous", range(4))
