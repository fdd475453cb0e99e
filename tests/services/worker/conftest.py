from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.services.worker.models.checkpoints import MAKERS, make
from tests.services.worker.models.group import Group, Local


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a checkpoint of MAKERS, made when it is first asked for."""
    root = tmp_path_factory.mktemp("checkpoints")

    def folder(name: str) -> Path:
        if not (root / name).is_dir():
            torch.manual_seed(0)
            make(MAKERS[name](), root / name)
        return root / name

    return folder


@pytest.fixture(scope="session")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Group | Local]]:
    """The group of so many ranks: started when it is first asked for, ended with the session."""
    groups: dict[int, Group | Local] = {}

    def start(size: int) -> Group | Local:
        if size not in groups:
            groups[size] = Local() if size == 1 else Group(size, tmp_path_factory.mktemp("group"))
        return groups[size]

    yield start
    for each in groups.values():
        each.close()
