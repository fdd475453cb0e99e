"""Kernels are compiled ahead by several threads, for a GPU that need not be here: a driver that stands for it loads nothing."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITCallable

from kernels.compilation import compile_noted, hash_sources, noting, receipt
from kernels.embedding import embedding_triton
from kernels.silu_and_mul import silu_and_mul_triton
from tests.kernels.support import INTERPRETED, ON_GPU

pytestmark = pytest.mark.skipif(INTERPRETED or ON_GPU, reason="compiles for a GPU that is not here")
CPU = torch.device("cpu")


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """Those that were built."""
    built: list[Any] = []

    def launcher(source: Any, metadata: Any) -> Callable[..., None]:
        built.append(metadata.name)
        return lambda *arguments: None

    hopper = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        launcher_cls=launcher,
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            load_binary=lambda name, binary, shared, device: (object(), object(), 0, 0, 1024),
        ),
    )
    before = driver._active
    driver.set_active(hopper)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    yield built
    driver._active = before


def test_a_dry_run_tells_what_to_compile_and_its_memory_is_zeros(launchers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> torch.Tensor:
        for size in (64, 768, 64):  # of powers of two, and not
            silu_and_mul_triton(torch.ones(4, 2 * size))
        return embedding_triton(torch.zeros(3, dtype=torch.int32), torch.ones(2, 8), 0)

    with noting() as noted:
        assert not run().any()
    assert len(noted) == 3
    assert not launchers
    parts: list[float] = []
    assert compile_noted(noted, CPU, 2, parts.append) == 3
    assert parts == [pytest.approx(number / 3) for number in (1, 2, 3)]
    assert sorted(launchers) == ["_embedding_kernel", "_silu_and_mul_kernel", "_silu_and_mul_kernel"]
    with noting() as again:
        run()  # now they are launched
    assert not again
    assert compile_noted(noted, CPU, 2, parts.append) == 0  # Triton's cache has them
    found: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: found.append(cache_hit))
    for kernel, _ in noted.values():
        kernel.device_caches.clear()  # as in a process that has just started
    run()
    assert found == [True] * 3


def test_a_kernel_has_one_key_in_whatever_order_kernels_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    hash_sources()  # has imported them
    modules = [module for name, module in sys.modules.items() if name.startswith("kernels.")]
    functions = {id(each): each for module in modules for each in vars(module).values() if isinstance(each, JITCallable)}

    def keys(order: list[int], hashed_before: bool) -> dict[int, str]:
        for function in functions.values():
            monkeypatch.setattr(function, "hash", None)
            monkeypatch.setattr(function, "used_global_vals", {})
        if hashed_before:
            hash_sources()
        return {each: functions[each].cache_key for each in order}

    order = list(functions)
    assert keys(order, False) != keys(order[::-1], False), "this Triton does without hash_sources"
    assert keys(order, True) == keys(order[::-1], True)


def test_a_receipt_is_of_what_was_compiled_with_what(launchers: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = receipt("a GPU", 256)
    assert before == receipt("a GPU", 256)
    assert before.parent == tmp_path
    assert not before.exists()
    assert receipt("a GPU", 128) != before
    monkeypatch.setattr(triton, "__version__", "9.9.9")
    assert receipt("a GPU", 256) != before
