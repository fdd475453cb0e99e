"""The command line: one line and status 2 for what it cannot take."""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.services.local.launched import Launched


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["serve", "/no/such/folder"], "/no/such/folder"),
        (["serve", "--port", "65536"], "--port"),
        (["serve", "--dtype", "int8"], "--dtype"),
        (["serve", "--tensor-parallel-size", "0"], "--tensor-parallel-size"),
        (["serve", "--max-model-len", "many"], "--max-model-len"),
        (["serve", "--served-name", "x"], "--served-name"),
        (["server"], "server"),
        ([], "Missing command"),
    ],
)
def test_a_mistake_is_told_in_one_line(launch: Callable[..., Launched], arguments: list[str], named: str) -> None:
    launched = launch(*arguments)
    assert launched.end() == 2
    (line,) = launched.output.splitlines()
    assert line.startswith("lockstep: ")
    assert named in line


def test_version(launch: Callable[..., Launched]) -> None:
    launched = launch("--version")
    assert launched.end() == 0
    assert launched.output.strip() == importlib.metadata.version("lockstep")


def test_a_key_is_made_by_the_gateways_own_program(launch: Callable[..., Launched], tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()  # a folder of the user's that happens to be called so
    (tmp_path / "services" / "__init__.py").write_text("raise SystemExit('not ours')")
    launched = launch("key", "alice", "--file", "keys.json", "--requests-per-minute", "7")
    assert launched.end() == 0
    assert launched.output.startswith("sk-")
    (entry,) = json.loads((launched.folder / "keys.json").read_text())["keys"]
    assert (entry["name"], entry["requests_per_minute"]) == ("alice", 7)
    assert hashlib.sha256(launched.output.strip().encode()).hexdigest() == entry["sha256"]
