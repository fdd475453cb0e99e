"""Tests that need root, Debian packages or a registry: they install what they need, and a tool that is missing fails them."""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENT = ("-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=120")  # with mirrors, and with others who install
DEBIAN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def pytest_sessionstart() -> None:
    """SIGTERM, by which CI ends what takes too long, interrupts as Ctrl-C does: fixtures remove what they have made."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextlib.contextmanager
def alone(name: str) -> Iterator[int]:
    """On this machine one process at a time is in a block of this name, or has inherited its descriptor; whichever run it belongs to."""
    with (Path(tempfile.gettempdir()) / f"lockstep-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def execute(command: Sequence[str | Path], timeout: float, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Its output, errors too. Whatever ends the waiting ends everything that the command has started, which would go on without it."""
    with subprocess.Popen(
        command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, output[-6000:]
    return output


def require_space(folder: Path, needed_bytes: int, purpose: str) -> None:
    """Fails before the work that would fill the disk, and so fail whatever else runs on this machine."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        pytest.fail(f"{purpose} needs {needed_bytes / 1e9:.1f} GB at {folder}, and {free / 1e9:.1f} GB are free there", pytrace=False)


def sources() -> list[Path]:
    """The files of the working tree that git does not ignore; relative to it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [Path(name) for name in listing.split("\0") if (ROOT / name).is_file()]


def copy_sources(folder: Path) -> None:
    """A place to build in: setuptools and make leave their work beside what they build, and would find it again."""
    for path in sources():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)


def is_installed(package: str) -> bool:
    query = subprocess.run(
        ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package], capture_output=True, text=True, check=False
    )
    return query.stdout == "installed"


@pytest.fixture(scope="session")
def debian() -> Callable[..., None]:
    """`debian("prometheus")` installs packages that are missing."""

    def install(*packages: str) -> None:
        with alone("apt"):
            missing = [package for package in packages if not is_installed(package)]
            if not missing:
                return
            for command in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
                subprocess.run(
                    ["apt-get", "-qq", *PATIENT, *command],
                    check=True,
                    stdout=subprocess.DEVNULL,
                    env={"DEBIAN_FRONTEND": "noninteractive", "PATH": DEBIAN_PATH},
                )

    return install
