"""The tests of tests/kernels on a real GPU, in bfloat16 too: they take the GPU when there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
MOST_PROCESSES = 8  # the kernels are small; what takes long is compiling them


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.timeout(600)
def test_kernels_on_the_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "pytest", "--quiet", "--no-header", f"--numprocesses={processes}", str(ROOT / "tests" / "kernels")]
    finished = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-20_000:] + finished.stderr[-5_000:]
