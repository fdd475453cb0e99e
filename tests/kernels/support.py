"""Where the kernel tests run, and with what.

With TRITON_INTERPRET=1 in the environment the Triton kernels run in Triton's interpreter, on a machine with a GPU on the
GPU, beside their torch references; elsewhere the references are tested alone, and test_interpreter.py starts the first kind.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import triton
from torch import Tensor

F = TypeVar("F", bound=Callable[..., object])

INTERPRETED: bool = triton.knobs.runtime.interpret
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
# The interpreter gets bfloat16 dots wrong.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
ULP = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def implementations(reference: F, kernel: F) -> list[F]:
    """Those of an operation that this run tests."""
    if INTERPRETED:
        return [kernel]
    return [reference, kernel] if ON_GPU else [reference]


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), device=DEVICE).to(dtype)


def assert_near(actual: Tensor, expected: Tensor, ulps: float, floor: float = 1e-6) -> None:
    """Within so many units in the last place of actual's dtype, relative to 1 for expected values below 1."""
    tolerance = max(ulps * ULP[actual.dtype], floor)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)
