"""Runs the tests beside this file once more, in a process of their own, with the Triton kernels in Triton's interpreter.

Of its own, since TRITON_INTERPRET must be set before anything imports triton, and would reach every other test.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.support import INTERPRETED, ON_GPU

HERE = Path(__file__).parent


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter's process")
@pytest.mark.skipif(ON_GPU, reason="the kernels themselves run here")
@pytest.mark.timeout(400)
def test_kernels_in_the_interpreter() -> None:
    # A product's row must not depend on its place in the tile, as on a GPU; OpenBLAS's newer kernels for some processors add it up by that.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Nehalem"}
    command = [sys.executable, "-m", "pytest", "--quiet", "--no-header", str(HERE)]
    finished = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-20_000:] + finished.stderr[-5_000:]
