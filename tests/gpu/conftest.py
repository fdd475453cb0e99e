"""Checkpoints for the tests that need a GPU; without one they are skipped."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.services.worker.models.checkpoints import MAKERS, make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a checkpoint of MAKERS with weights that bfloat16 holds exactly, made when it is first asked for."""
    root = tmp_path_factory.mktemp("checkpoints")

    def folder(name: str) -> Path:
        if not (root / name).is_dir():
            torch.manual_seed(0)
            make(MAKERS[name]().bfloat16(), root / name)
        return root / name

    return folder
