"""A small model under NVIDIA's compute-sanitizer, where the machine has it: no kernel reads or writes where it must not."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.timeout(600)
def test_no_access_out_of_bounds(checkpoint: Callable[[str], Path]) -> None:
    """Attention, experts and sampling, in chunks and with decodes; every tensor is an allocation of its own, so that its end is known."""
    # The default limit to a process's first call of CUDA is shorter than the import of torch on a cold disk.
    command = ["compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--launch-timeout", "300", "--error-exitcode", "9"]
    command += [sys.executable, "-m", "tests.gpu.sanitized", str(checkpoint("qwen3-moe"))]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    finished = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=550)
    assert finished.returncode == 0, finished.stdout[-20_000:] + finished.stderr[-5_000:]
    assert "done on a GPU" in finished.stdout
    assert "ERROR SUMMARY: 0 errors" in finished.stdout
