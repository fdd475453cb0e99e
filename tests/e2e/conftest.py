"""Fixtures of the end-to-end tests: models, and stacks of real processes."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.worker.weights import demo
from tests import tiny
from tests.e2e.stack import Stack


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the demo model."""
    return demo.demo_model()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights that computes in no time."""
    return tiny.tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def weightless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for the scripted engine, called `tiny` too."""
    return tiny.weightless_model(tmp_path_factory.mktemp("weightless") / "tiny")


@pytest.fixture
def start_stack(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """Starts a stack with the arguments of `Stack`; stopped at the end of the test. A fixture of wider scope enters a Stack itself."""
    with contextlib.ExitStack() as stacks:

        def start(**options: Any) -> Stack:
            folder = tmp_path / f"stack-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            return stacks.enter_context(Stack(folder, **options))

        yield start
