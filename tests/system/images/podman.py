"""Podman, and that nothing stays of what was made with it: images are gigabytes, which add up with every run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.system.conftest import ROOT, alone

LABEL = "lockstep.tests=images"  # of the base, and so of everything that is built from it
CLEAR_S = 300.0


class Podman:
    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env

    def __call__(self, *arguments: str, check: bool = True, timeout: float = CLEAR_S) -> str:
        done = subprocess.run(["podman", *arguments], env=self.env, capture_output=True, text=True, timeout=timeout)
        if check and done.returncode:
            raise AssertionError(f"podman {' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done.stdout + ("" if check else done.stderr)

    def size(self, image: str) -> int:
        return int(json.loads(self("image", "inspect", image))[0]["Size"])

    def clear(self) -> None:
        """Removes the containers and images of LABEL, those of builds that were broken off too, and no others."""
        ours = ("--filter", f"label={LABEL}")
        if containers := self("ps", "--all", "--quiet", *ours).split():
            self("rm", "--force", "--time", "0", *containers)
        self("image", "prune", "--all", "--external", "--force", *ours)


@contextmanager
def cleared(podman: Podman) -> Iterator[None]:
    """Nothing of LABEL is there before and after, and no other run makes any meanwhile.

    A process of its own sees to it: it waits until we close its input, or are gone, however that came about.
    """
    command = [sys.executable, "-m", __name__]
    quiet = subprocess.DEVNULL
    with alone("images") as lock:
        podman.clear()  # a machine that was switched off could not
        with subprocess.Popen(
            command, cwd=ROOT, env=podman.env, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, pass_fds=[lock], start_new_session=True
        ) as janitor:
            yield
    assert janitor.returncode == 0, "what was made with podman could not be removed"


if __name__ == "__main__":
    sys.stdin.read()
    Podman(os.environ).clear()
