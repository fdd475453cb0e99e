"""Checkpoints for the tests that need a GPU; without one they are skipped. Those that need several are left out where there are fewer."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.services.worker.models.checkpoints import MAKERS, make


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        return
    elsewhere = {item for item in items for mark in item.iter_markers("gpus") if mark.args[0] > torch.cuda.device_count()}
    config.hook.pytest_deselected(items=list(elsewhere))
    items[:] = [item for item in items if item not in elsewhere]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    deselected = terminalreporter.stats.get("deselected", [])
    left_out = {item.nodeid for item in deselected for mark in item.iter_markers("gpus") if mark.args[0] > torch.cuda.device_count() > 0}
    if left_out:
        terminalreporter.write_line(
            f"{len(left_out)} tests need more GPUs than this machine has ({torch.cuda.device_count()}) and are left out"
        )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a checkpoint of MAKERS with weights that bfloat16 holds exactly, made when it is first asked for."""
    return _checkpoints(tmp_path_factory.mktemp("checkpoints"), 1.0)


@pytest.fixture(scope="session")
def smooth_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Models that rounding changes a little, as it does real ones: weights as in training's beginning, and all experts at once, since
    one that is chosen in place of another changes everything."""
    return _checkpoints(tmp_path_factory.mktemp("smooth"), 0.3)


def _checkpoints(root: Path, scale: float) -> Callable[[str], Path]:
    def folder(name: str) -> Path:
        if not (root / name).is_dir():
            torch.manual_seed(0)
            model = MAKERS[name]()
            for parameter in model.parameters():
                parameter.data.mul_(scale)
            make(model.bfloat16(), root / name)
            if scale < 1:
                path = root / name / "config.json"
                config = json.loads(path.read_text())
                if "num_experts_per_tok" in config:
                    config["num_experts_per_tok"] = config.get("num_experts") or config["num_local_experts"]
                path.write_text(json.dumps(config))
        return root / name

    return folder
