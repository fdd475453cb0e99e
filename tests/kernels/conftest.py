from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton

from kernels import tuning
from tests.kernels.support import INTERPRETED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of these files that belong to another run of them (on a GPU, in the interpreter) are left out of this one."""
    folder = Path(__file__).parent
    elsewhere = {item for item in items if folder in item.path.parents and any(mark.args[0] for mark in item.iter_markers("skipif"))}
    config.hook.pytest_deselected(items=list(elsewhere))
    items[:] = [item for item in items if item not in elsewhere]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuning.Tables]:
    """Those of every device, to be filled before anything asks for them; empty."""
    given: tuning.Tables = {}
    tuning.forget()
    monkeypatch.setattr(tuning, "tables", lambda device: given)
    yield given
    tuning.forget()


@pytest.fixture
def table(tables: tuning.Tables) -> tuning.Table:
    """That of 16 bits and of the Triton that runs."""
    return tables.setdefault(triton.__version__, {}).setdefault("16 bits", {})


if INTERPRETED:
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """Triton 3.6 takes `int()` of a scalar that it keeps as an array of one element; NumPy 2.4 no longer allows that."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
