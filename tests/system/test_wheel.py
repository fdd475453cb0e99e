"""The wheel as a user gets it: nothing of the packages is missing in it, and it runs from an empty environment."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = ROOT / "constraints.txt"


def tracked() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z", "--cached"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [Path(name) for name in listing.split("\0") if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tracked files, since setuptools leaves its work beside what it builds, and reads it again."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in tracked():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", target, source], check=True)
    return next(target.glob("lockstep-*.whl"))


def test_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    packages = {"benchmarks", "kernels", "services", "shared"}
    expected = {str(path) for path in tracked() if path.parts[0] in packages}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == expected


@pytest.mark.timeout(900)  # installs torch
def test_wheel_runs_from_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    for requirement in (torch, f"lockstep[local] @ {wheel.as_uri()}"):
        subprocess.run([tmp_path / "venv/bin/pip", "install", "--quiet", "--constraint", CONSTRAINTS, requirement], check=True)
    answer = subprocess.run([tmp_path / "venv/bin/lockstep", "--version"], cwd=tmp_path, stdout=subprocess.PIPE, check=True, text=True)
    assert PROJECT["version"] in answer.stdout
