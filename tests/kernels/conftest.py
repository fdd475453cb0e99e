from pathlib import Path
from typing import Any

import pytest

from tests.kernels.support import INTERPRETED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of these files that belong to another run of them (on a GPU, in the interpreter) are left out of this one."""
    folder = Path(__file__).parent
    elsewhere = {item for item in items if folder in item.path.parents and any(mark.args[0] for mark in item.iter_markers("skipif"))}
    config.hook.pytest_deselected(items=list(elsewhere))
    items[:] = [item for item in items if item not in elsewhere]


if INTERPRETED:
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """Triton 3.6 takes `int()` of a scalar that it keeps as an array of one element; NumPy 2.4 no longer allows that."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
