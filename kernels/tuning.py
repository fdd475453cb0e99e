"""What was measured to run fastest on a GPU: `tuning_NAME.json` beside this, written by `python -m benchmarks tune`, `tune-library`,
`tune-head`, `tune-attention` and `tune-experts`.

    {TRITON: {"16 bits": {"linear": {"COLUMNSxSIZE": {"ROWS": [a skinny_linear.Config]}}, "gated_linear": the same,
                          "library": {"COLUMNSxSIZE": {"ROWS": [1] where cuBLASLt is faster than cuBLAS}},
                          "offering_head": {"COLUMNSxSIZE": {"ROWS": [an offering_head.Config]}},
                          "decode_attention": {"QUERY_HEADSxKV_HEADSxHEAD_SIZE": {"ROWS": [a decode_splits.Config]}},
                          "moe": {"EXPERTSxCHOICESxHIDDENxINNER": {"TOKENS": [a moe.Config]}}}}}

TRITON is the version that compiled what was measured, the bits are an element's: types of one size run alike. An entry serves up to that
many rows, the least such entry; of a head they are powers of two, whose kernels a worker compiles before its first step. Where a product
has no entry, or an empty one, the library's runs, a head makes logits only, and attention goes by rules; of experts the greatest serves
more tokens, too.

A size that was not measured with the Triton that runs has the entry of the latest other version: a compiler changes what tiles take by
little, while a product without an entry takes up to four times as long. `borrowed` tells of what was served so.
"""

import functools
import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import ParamSpec, TypeVar, cast

import torch
import triton
from torch.torch_version import TorchVersion

FOLDER = resources.files("kernels")

Table = dict[str, dict[str, dict[str, list[int]]]]
Tables = dict[str, dict[str, Table]]  # by version and bits


P = ParamSpec("P")
R = TypeVar("R")
_forgetting: list[Callable[[], None]] = []


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """`functools.cache`, for what follows from the tables, until `forget`."""
    cached = functools.cache(function)
    _forgetting.append(cached.cache_clear)
    return cast(Callable[P, R], cached)


def forget() -> None:
    """Has all that follows from the tables looked up anew: after they changed."""
    for each in _forgetting:
        each()


def file_name(device_name: str) -> str:
    """Of the tables of a GPU, by the name that its driver gives."""
    return f"tuning_{device_name.lower().replace(' ', '_')}.json"


def bits(dtype: torch.dtype) -> str:
    """The key of types of this size."""
    return f"{8 * dtype.itemsize} bits"


@functools.cache
def tables(device: torch.device) -> Tables:
    """Empty for a CPU and for a GPU that was not measured."""
    if device.type != "cuda":
        return {}
    file = FOLDER / file_name(torch.cuda.get_device_name(device))
    read: Tables = json.loads(file.read_text()) if file.is_file() else {}
    return read


@remembered
def entries(device: torch.device, dtype: torch.dtype, operation: str, shape: str) -> Mapping[str, list[int]]:
    """Of a shape, by size: those of the Triton that runs, and of other versions what it lacks."""
    found: dict[str, tuple[str, list[int]]] = {}
    for version in sorted(tables(device), key=lambda version: (version == triton.__version__, TorchVersion(version))):
        measured = tables(device)[version].get(bits(dtype), {}).get(operation, {}).get(shape, {})
        found |= {size: (version, numbers) for size, numbers in measured.items()}
    others = {version for version, _ in found.values()} - {triton.__version__}
    if others and operation != "library":  # whose products no Triton compiles
        borrowed(device)[f"{operation} {shape}"] = ", ".join(sorted(others))
    return {size: numbers for size, (_, numbers) in found.items()}


def entry_for(measured: Mapping[str, list[int]], size: int) -> list[int] | None:
    """Of a shape's entries, the least that serves so many rows or tokens; None if none does."""
    least = min((int(most) for most in measured if int(most) >= size), default=None)
    return None if least is None else measured[str(least)]


@remembered
def borrowed(device: torch.device) -> dict[str, str]:
    """Operations and shapes that this process has asked for and that have entries of other versions of Triton: which."""
    return {}
