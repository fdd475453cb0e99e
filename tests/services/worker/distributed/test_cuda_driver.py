"""The binding of CUDA's driver: its signatures against cuda.h, its errors. No GPU: the library's double has its C interface."""

import ctypes
import re
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.distributed import cuda_driver
from services.worker.distributed.cuda_driver import Driver, DriverError, Handle

DECLARATIONS = """
cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize);
cuMemsetD8_v2(CUdeviceptr dstDevice, unsigned char uc, size_t N);
cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr);
cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags);
cuGetErrorName(CUresult error, const char **pStr);
"""
C_TYPES: dict[str, Any] = {
    "CUdeviceptr": ctypes.c_uint64,  # unsigned long long on all 64-bit machines
    "CUdeviceptr *": ctypes.POINTER(ctypes.c_uint64),
    "CUipcMemHandle": Handle,
    "CUipcMemHandle *": ctypes.POINTER(Handle),
    "CUresult": ctypes.c_int,
    "const char **": ctypes.POINTER(ctypes.c_char_p),
    "size_t": ctypes.c_size_t,
    "unsigned char": ctypes.c_ubyte,
    "unsigned int": ctypes.c_uint,
}
ADDRESS, OTHER = 0x7F00_0000_0000, 0x7F11_0000_0000
NAME = ctypes.create_string_buffer(b"CUDA_ERROR_OF_A_KIND")


def library(results: dict[str, int] | None = None, without: str = "") -> SimpleNamespace:
    """A libcuda whose functions give these results, and note how they were called."""
    calls: list[tuple[Any, ...]] = []

    def function(name: str) -> Any:
        def called(*arguments: Any) -> int:
            calls.append((name, *arguments))
            if name in ("cuMemAlloc_v2", "cuIpcOpenMemHandle_v2"):
                arguments[0][0] = ADDRESS if name == "cuMemAlloc_v2" else OTHER
            if name == "cuIpcGetMemHandle":
                ctypes.memmove(arguments[0], bytes(range(64)), 64)
            if name == "cuGetErrorName":
                arguments[1][0] = ctypes.cast(NAME, ctypes.c_char_p)
            return (results or {}).get(name, 0)

        return ctypes.CFUNCTYPE(ctypes.c_int, *cuda_driver.FUNCTIONS[name])(called)

    return SimpleNamespace(**{name: function(name) for name in cuda_driver.FUNCTIONS.keys() - {without}}, calls=calls)


def test_signatures_are_those_of_cuda_h() -> None:
    declared = {
        name: tuple(C_TYPES[re.sub(r"\w+$", "", argument.strip()).strip()] for argument in arguments.split(","))
        for name, arguments in re.findall(r"(\w+)\(([^)]*)\);", DECLARATIONS)
    }
    assert declared == cuda_driver.FUNCTIONS
    assert ctypes.sizeof(Handle) == 64


def test_memory_is_zeroed_shared_and_opened() -> None:
    double = library()
    driver = Driver(double)
    assert driver.allocate(1 << 33) == ADDRESS
    assert [call[0] for call in double.calls] == ["cuMemAlloc_v2", "cuMemsetD8_v2"]
    assert double.calls[1][1:] == (ADDRESS, 0, 1 << 33)
    assert driver.share(ADDRESS) == bytes(range(64))
    assert driver.open(bytes(range(64))) == OTHER
    assert (bytes(double.calls[-1][2]), double.calls[-1][3]) == (bytes(range(64)), 1)


def test_what_fails_is_named() -> None:
    driver = Driver(library(results={"cuIpcOpenMemHandle_v2": 217}))
    with pytest.raises(DriverError, match=r"^cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_OF_A_KIND \(result 217\)$"):
        driver.open(bytes(64))


def test_a_library_without_a_function_is_refused() -> None:
    with pytest.raises(DriverError, match=r"^libcuda\.so\.1 has no cuIpcGetMemHandle$"):
        Driver(library(without="cuIpcGetMemHandle"))


def test_a_missing_driver_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-absent.so.1")
    with pytest.raises(DriverError, match=r"^libcuda-absent\.so\.1 cannot be loaded"):
        cuda_driver.load()
