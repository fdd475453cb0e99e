import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import launch
from tests.kernels.support import DEVICE

GPU = torch.device("cuda", 0)


@pytest.fixture
def allowed_again() -> Iterator[None]:
    yield
    launch.allow_pdl(True)


@pytest.mark.usefixtures("allowed_again")
@pytest.mark.parametrize("capability, used", [((8, 0), False), ((9, 0), True), ((10, 0), True)])
def test_pdl_is_used_from_hopper_on_until_it_is_turned_off(monkeypatch, capability, used):
    monkeypatch.setattr(launch, "capability", lambda device: capability)
    assert launch.pdl_options(GPU) == {"PDL": used, "launch_pdl": used}
    launch.allow_pdl(False)
    assert launch.pdl_options(GPU) == {"PDL": False, "launch_pdl": False}


def test_counters_are_shared_and_zero():
    counters = launch.counters(DEVICE)
    assert counters is launch.counters(DEVICE)
    assert not counters.any()


def test_a_profile_tells_kernels_apart_by_their_names():
    files = Path(launch.__file__).parent.glob("*.py")
    names = [name for file in files for name in re.findall(r"^def (\w*_kernel)\(", file.read_text(), re.MULTILINE)]
    assert len(names) == len(set(names)) > 10
    assert "_kernel" not in names
