"""Tests that need root, Debian packages or a registry: they install what they need, and a tool that is missing fails them."""

import subprocess
from collections.abc import Callable

import pytest


def is_installed(package: str) -> bool:
    query = subprocess.run(
        ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package], capture_output=True, text=True, check=False
    )
    return query.stdout == "installed"


@pytest.fixture(scope="session")
def debian() -> Callable[..., None]:
    """`debian("prometheus")` installs packages that are missing."""

    def install(*packages: str) -> None:
        missing = [package for package in packages if not is_installed(package)]
        if missing:
            for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-qq", "--yes", "--no-install-recommends", *missing]):
                subprocess.run(
                    command, check=True, stdout=subprocess.DEVNULL, env={"DEBIAN_FRONTEND": "noninteractive", "PATH": DEBIAN_PATH}
                )

    return install


DEBIAN_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
