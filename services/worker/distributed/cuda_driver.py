"""The few functions of CUDA's driver that share a GPU's memory between processes, by ctypes: importing it needs no GPU.

The driver's own library, since every machine with a GPU has it under one name. Calls act on the calling thread's current context:
torch's, once it has computed there.
"""

import ctypes
from collections.abc import Callable
from typing import Any

from shared.errors import LockstepError

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # CUipcMem_flags


class Handle(ctypes.Structure):
    """CUipcMemHandle: names an allocation to other processes of the machine. Passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


_address, _size = ctypes.c_uint64, ctypes.c_size_t
FUNCTIONS: dict[str, tuple[Any, ...]] = {  # arguments; the result is a CUresult
    "cuMemAlloc_v2": (ctypes.POINTER(_address), _size),
    "cuMemsetD8_v2": (_address, ctypes.c_ubyte, _size),
    "cuIpcGetMemHandle": (ctypes.POINTER(Handle), _address),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_address), Handle, ctypes.c_uint),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class DriverError(LockstepError):
    """The driver is not there, or refused a call."""


class Driver:
    """A loaded library with checked calls; addresses are numbers."""

    def __init__(self, library: Any) -> None:
        """library: a CDLL. Raises DriverError when it lacks a function."""
        self._functions: dict[str, Callable[..., int]] = {}
        for name, arguments in FUNCTIONS.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise DriverError(f"{LIBRARY} has no {name}") from error
            function.argtypes, function.restype = arguments, ctypes.c_int
            self._functions[name] = function

    def allocate(self, size: int) -> int:
        """`size` bytes of zeros, for as long as the process lives."""
        address = _address()
        self._call("cuMemAlloc_v2", ctypes.byref(address), size)
        self._call("cuMemsetD8_v2", address, 0, size)
        return address.value

    def share(self, address: int) -> bytes:
        """A handle of an allocation of ours, by which another process opens it."""
        handle = Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Where the allocation of another process is for the GPU of the current context, which may be another one than it is on."""
        address = _address()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), Handle.from_buffer_copy(handle), LAZY_PEER_ACCESS)
        return address.value

    def _call(self, name: str, *arguments: Any) -> None:
        result = self._functions[name](*arguments)
        if result:
            text = ctypes.c_char_p()
            self._functions["cuGetErrorName"](result, ctypes.byref(text))
            raise DriverError(f"{name} failed: {(text.value or b'unknown').decode()} (result {result})")


def load() -> Driver:
    """The installed driver. Raises DriverError when there is none."""
    try:
        return Driver(ctypes.CDLL(LIBRARY))
    except OSError as error:
        raise DriverError(f"{LIBRARY} cannot be loaded: {error}") from error
