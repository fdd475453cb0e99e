"""Fixtures of the launcher's tests."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import tiny
from tests.services.local.launched import Launched


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.weightless_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Runs `lockstep ARGUMENTS`; ended after the test."""
    with contextlib.ExitStack() as ends:

        def start(*arguments: str, **environment: str) -> Launched:
            launched = Launched(tmp_path, *arguments, **environment)
            ends.callback(launched.clean_up)
            return launched

        yield start


@pytest.fixture
def serve(launch: Callable[..., Launched], model: Path, tmp_path: Path) -> Callable[..., Launched]:
    """`lockstep serve` with the scripted engine, on a free port; `load_s` and so on go into its script."""

    def start(*arguments: str, **script: object) -> Launched:
        script_file = tmp_path / "script.json"
        script_file.write_text(json.dumps({"default": {"ids": [40, 41], "repeat": True}, **script}))
        return launch("serve", str(model), "--engine", "scripted", "--script", str(script_file), "--port", "0", *arguments)

    return start
