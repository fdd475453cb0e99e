"""The wheel as a user gets it: nothing of the packages is missing in it, and it runs from an empty environment."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.system.conftest import ROOT, copy_sources, require_space, sources

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = ROOT / "constraints.txt"
ENVIRONMENT_BYTES = 3_000_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    copy_sources(source)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", target, source], check=True)
    return next(target.glob("lockstep-*.whl"))


def test_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    packages = {"benchmarks", "kernels", "services", "shared"}
    expected = {str(path) for path in sources() if path.parts[0] in packages}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == expected


@pytest.mark.timeout(900)  # installs torch
def test_wheel_runs_from_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    require_space(tmp_path, ENVIRONMENT_BYTES, "an environment with torch")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    for requirement in (torch, f"lockstep[local] @ {wheel.as_uri()}"):
        subprocess.run([tmp_path / "venv/bin/pip", "install", "--quiet", "--constraint", CONSTRAINTS, requirement], check=True)
    answer = subprocess.run([tmp_path / "venv/bin/lockstep", "--version"], cwd=tmp_path, stdout=subprocess.PIPE, check=True, text=True)
    assert PROJECT["version"] in answer.stdout
