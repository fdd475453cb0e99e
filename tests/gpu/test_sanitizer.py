"""A small model under NVIDIA's compute-sanitizer, where the machine has it: no kernel reads or writes where it must not."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.timeout(600)
def test_no_access_out_of_bounds() -> None:
    """Attention, experts and sampling, in chunks and with decodes; every tensor is an allocation of its own, so that its end is known."""
    case = "tests/gpu/test_models.py::test_float32_logits_and_greedy_tokens_equal_transformers[qwen3-moe]"
    command = ["compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9"]
    command += [sys.executable, "-m", "pytest", "--quiet", "--no-header", "-p", "no:cacheprovider", case, "--timeout=550"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    finished = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-20_000:] + finished.stderr[-5_000:]
    assert "ERROR SUMMARY: 0 errors" in finished.stdout
