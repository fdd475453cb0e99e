import pytest

from services.scheduler.settings import SchedulerSettings
from shared.errors import ConfigError
from shared.settings import load


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_SCHEDULER_WORKER", raising=False)


@pytest.mark.parametrize(
    "arguments, workers",
    [
        (["--worker", "a:1"], ["a:1"]),
        (["--worker", "a:1", "--worker", "[::1]:2"], ["a:1", "[::1]:2"]),
        (["--worker", "worker-0.workers.ns.svc:7200"], ["worker-0.workers.ns.svc:7200"]),
    ],
)
def test_workers_on_the_command_line(arguments: list[str], workers: list[str]) -> None:
    assert load(SchedulerSettings, "scheduler", arguments).worker == workers


def test_workers_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_SCHEDULER_WORKER", "a:1,b:2")
    assert load(SchedulerSettings, "scheduler", []).worker == ["a:1", "b:2"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--worker", "nonsense"],
        ["--worker", "a:65536"],  # gRPC would take it for port 0, and 70000 for 4464
        ["--worker", "a:0"],
        ["--worker", "a:1", "--worker", "a:1"],
        ["--worker", "a:1", "--max-step-tokens", "0"],
        ["--worker", "a:1", "--group-wait-s", "-1"],
        ["--worker", "a:1", "--plan-deadline-s", "0"],
        ["--worker", "a:1", "--leadership", "raft"],
        ["--worker", "a:1", "--leadership", "file:"],
        ["--worker", "a:1", "--lease-duration-s", "1.5"],  # a leader may miss one renewal
    ],
)
def test_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        load(SchedulerSettings, "scheduler", arguments)
