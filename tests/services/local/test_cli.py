"""The command line: one line and status 2 for what it cannot take."""

import importlib.metadata
from collections.abc import Callable

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
