"""Kernels compiled ahead of their launches, many at a time: by itself Triton compiles each when it is first launched, one after the other,
and has a C compiler build a launcher for each.

A dry run tells which: within `noting`, a launch of what this process has not compiled is noted and skipped. Fresh memory is zeros there,
since what a skipped launch should have written may be an index of the next operation.
"""

import contextlib
import hashlib
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITCallable, JITFunction

import kernels

FRESH = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty}

Noted = dict[str, tuple[JITFunction[Any], str]]  # a kernel and what to compile it for, each once


def hash_sources() -> None:
    """Has Triton hash itself and all kernels, in one order; before any is launched.

    The key of a kernel in Triton's cache has the constants of a function that it calls only if that was hashed before it (3.6.0): by itself
    it depends on what the process launched earlier, and one process would compile anew what another has compiled.
    """
    triton_key()  # 0.3 s for 400 MB, and as much for each thread that asks before the first is done
    for module in pkgutil.iter_modules(kernels.__path__):
        for each in vars(import_module(f"{kernels.__name__}.{module.name}")).values():
            if isinstance(each, JITCallable):
                each.cache_key  # noqa: B018 - to ask for it makes it


def receipt(*what: object) -> Path:
    """A file in Triton's cache, to be made once all that `what` launches is compiled there: by this Triton, of these kernels and tables.

    The dry run costs more than to read the kernels one by one, so it is for a cache without the receipt.
    """
    digest = hashlib.sha256(repr((triton.__version__, *what)).encode())
    for path in sorted(each for each in Path(__file__).parent.iterdir() if each.suffix in (".py", ".json")):
        digest.update(path.read_bytes())
    return Path(triton.knobs.cache.dir) / f"lockstep-{digest.hexdigest()}"


class _ZeroMemory(TorchFunctionMode):
    """Of functions and not of operators, whose mode would import torch's compiler: seconds."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in FRESH:
            assert isinstance(result, Tensor)
            result.zero_()
        return result


@contextlib.contextmanager
def noting() -> Iterator[Noted]:
    """What runs within computes nothing of use. Not for threads that launch at the same time."""
    noted: Noted = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        noted[f"{fn.module} {fn.name} {compile['key']}"] = fn.jit_function, compile["specialization_data"]
        return True  # neither compiled nor launched

    runtime: Any = triton.knobs.runtime
    before, runtime.jit_cache_hook = runtime.jit_cache_hook, note
    try:
        with _ZeroMemory():
            yield noted
    finally:
        runtime.jit_cache_hook = before


def compile_noted(noted: Noted, device: torch.device, threads: int, progress: Callable[[float], None]) -> int:
    """Brings them to the device: compiled, or read from Triton's cache. Returns how many were compiled.

    threads: most of the work is outside the interpreter, in LLVM, ptxas and the C compiler. progress: is told the share that is done.
    """
    found: list[bool] = []  # in Triton's cache

    def listen(*, cache_hit: bool, **_: object) -> None:
        found.append(cache_hit)

    def bring(kernel: JITFunction[Any], specialisation: str) -> None:
        kernel.preload(specialisation).run  # noqa: B018 - to ask for it builds the launcher and loads the binary

    knobs: Any = triton.knobs.compilation
    before, knobs.listener = knobs.listener, listen
    try:
        with ThreadPoolExecutor(threads, "compile", *((torch.cuda.set_device, (device,)) if device.type == "cuda" else ())) as pool:
            wanted = [pool.submit(bring, *each) for each in noted.values()]
            for number, done in enumerate(as_completed(wanted), 1):
                done.result()
                progress(number / len(wanted))
    finally:
        knobs.listener = before
    return found.count(False)
