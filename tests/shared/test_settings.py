"""Settings: one line that names what is wrong, and nothing unknown accepted."""

import importlib.metadata

import pytest
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.gateway.settings import GatewaySettings
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings
from shared.errors import ConfigError
from shared.settings import Settings, load, load_or_exit


class ThingSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_THING_")

    port: int = Field(7, ge=0, le=65535)
    worker: list[str] = Field(default_factory=list)
    wait_s: float = Field(1.0, ge=0)


def test_the_command_line_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_THING_PORT", "8")
    assert load(ThingSettings, "thing", []).port == 8
    assert load(ThingSettings, "thing", ["--port", "9"]).port == 9


def test_a_list_is_a_repeated_flag() -> None:
    assert load(ThingSettings, "thing", ["--worker", "a:1", "--worker", "b:2"]).worker == ["a:1", "b:2"]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--port", "x"], "port"),
        (["--port", "65536"], "port"),
        (["--log-level", "loud"], "log_level"),
        (["--wait-s", "inf"], "wait_s"),
        (["--nope"], "--nope"),
    ],
)
def test_a_bad_setting_is_one_line_that_names_it(arguments: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as error:
        load(ThingSettings, "thing", arguments)
    assert "\n" not in str(error.value)


def test_an_unknown_variable_with_our_prefix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_THING_PROT", "1")
    with pytest.raises(ConfigError, match="LOCKSTEP_THING_PROT"):
        load(ThingSettings, "thing", [])


@pytest.mark.parametrize("settings", [GatewaySettings, SchedulerSettings, WorkerSettings])
@pytest.mark.parametrize(
    "variable, named", [("PORT", r"port: .*tcp://10\.0\.0\.1:80"), ("SERVICE_HOST", "{}SERVICE_HOST: no such setting")]
)
def test_k8s_05_a_service_link_is_named(monkeypatch: pytest.MonkeyPatch, settings: type[Settings], variable: str, named: str) -> None:
    prefix = settings.model_config["env_prefix"]
    monkeypatch.setenv(f"{prefix}{variable}", "tcp://10.0.0.1:80")
    with pytest.raises(ConfigError, match=named.format(prefix)):
        load(settings, "thing", ["--model", "/"] if settings is WorkerSettings else [])


def test_a_program_tells_its_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["thing", "--version"])
    with pytest.raises(SystemExit) as ended:
        load_or_exit(ThingSettings, "thing")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"thing {importlib.metadata.version('lockstep')}\n"
