"""Tests that need root, Debian packages or a registry: they install what they need, and a tool that is missing fails them."""

import fcntl
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

LOCK = Path(tempfile.gettempdir()) / "lockstep-apt.lock"  # tests run in several processes, and of apt there may be one


def is_installed(package: str) -> bool:
    query = subprocess.run(
        ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package], capture_output=True, text=True, check=False
    )
    return query.stdout == "installed"


@pytest.fixture(scope="session")
def debian() -> Callable[..., None]:
    """`debian("prometheus")` installs packages that are missing."""

    def install(*packages: str) -> None:
        with LOCK.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            missing = [package for package in packages if not is_installed(package)]
            if not missing:
                return
            for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-qq", "--yes", "--no-install-recommends", *missing]):
                subprocess.run(
                    command, check=True, stdout=subprocess.DEVNULL, env={"DEBIAN_FRONTEND": "noninteractive", "PATH": DEBIAN_PATH}
                )

    return install


DEBIAN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
