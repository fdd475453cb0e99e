"""Settings of a service: one class each, read once in `main` from `LOCKSTEP_<SERVICE>_*` variables and the command line, which wins."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict, SettingsError

from shared.errors import ConfigError

TraceEndpoint = Annotated[
    str | None,
    Field(
        pattern=r"^https?://\S+$", description="Collector to send spans to by OTLP over HTTP, such as http://collector:4318; off without."
    ),
]
TraceRatio = Annotated[float, Field(ge=0, le=1, description="Share of the traces that begin here which are recorded.")]
TtftSlo = Annotated[float | None, Field(gt=0, description="Objective for the time to the first token: a bound of its histograms too.")]
ItlSlo = Annotated[float | None, Field(gt=0, description="Objective for the time between two tokens: a bound of its histograms too.")]
AdminPort = Annotated[int, Field(ge=0, le=65535, description="Port of /livez, /readyz and /metrics; 0 lets the kernel pick.")]


def _split_at_commas(value: object) -> object:
    return value.split(",") if isinstance(value, str) else value


def _with_a_port(address: str) -> str:
    """A number beyond the last port would be taken modulo 65,536: somebody else's."""
    if not 1 <= int(address.rpartition(":")[2]) <= 65535:
        raise ValueError(f"{address}: ports are from 1 to 65535")
    return address


Address = Annotated[str, StringConstraints(pattern=r"^(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$"), AfterValidator(_with_a_port)]
Addresses = Annotated[list[Address], NoDecode, BeforeValidator(_split_at_commas)]  # repeatable, in the variable separated by commas


class Settings(BaseSettings):
    """What every service can be told. A subclass sets `env_prefix`; names that it does not know are refused."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, cli_kebab_case=True, cli_exit_on_error=False, cli_avoid_json=True
    )

    host: str = Field("127.0.0.1", description="Address to listen on.")
    admin_port: AdminPort = 0  # each service has its own default
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"
    tls_folder: Path | None = Field(
        None, description="Folder with tls.crt, tls.key and ca.crt: gRPC then takes mutual TLS; else in the clear."
    )
    ports_file: Path | None = Field(None, description="Write the ports that were bound to this file, as JSON.")
    parent_pid: int | None = Field(None, ge=1, description="Stop when this process, the parent, is gone.")


S = TypeVar("S", bound=Settings)


def load(settings: type[S], program: str, arguments: Sequence[str]) -> S:
    """Reads environment and command line. Raises ConfigError with one line that names the setting."""
    prefix = settings.model_config["env_prefix"].upper()
    known = {f"{prefix}{name.upper()}" for name in settings.model_fields}
    for variable in os.environ:
        if variable.upper().startswith(prefix) and variable.upper() not in known:
            raise ConfigError(f"{variable}: no such setting; '{program} --help' lists them")
    try:
        return settings(_cli_parse_args=list(arguments), _cli_prog_name=program)  # type: ignore[call-arg]
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"]) or "settings"
        value = f", got {str(first['input'])[:100]!r}" if first["type"] not in ("missing", "extra_forbidden", "value_error") else ""
        raise ConfigError(f"{name}: {first['msg']}{value}") from error
    except SettingsError as error:
        raise ConfigError(" ".join(str(error).split())) from error


def load_or_exit(settings: type[S], program: str) -> S:
    """`load` for `main`: a bad setting is told in one line on stderr, exit status 2; `--version` prints it and ends with 0."""
    if sys.argv[1:] == ["--version"]:
        print(program, version("lockstep"))
        raise SystemExit(0)
    try:
        return load(settings, program, sys.argv[1:])
    except ConfigError as error:
        print(f"{program}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
