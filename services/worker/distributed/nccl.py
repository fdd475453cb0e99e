"""The few functions of libnccl that we call, by ctypes: no torch here, and no GPU needed to import it."""

import ctypes
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, LockstepError, PeerLost

LIBRARY = "libnccl.so.2"
OLDEST = (2, 10, 3)  # the first that adds bfloat16
UNIQUE_ID_BYTES = 128

SUM = 0  # ncclRedOp_t
DATA_TYPES = {  # ncclDataType_t, by the name of torch's dtype
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "int64": 4,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
SYSTEM_ERROR, REMOTE_ERROR = 2, 6  # ncclResult_t: a connection, or who is at its other end


class UniqueId(ctypes.Structure):
    """ncclUniqueId: rank 0 makes it, every rank joins with it. Passed by value."""

    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


_pointer, _int, _size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
FUNCTIONS: dict[str, tuple[Any, ...]] = {  # arguments; the result is an ncclResult_t
    "ncclGetVersion": (ctypes.POINTER(_int),),
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclCommInitRank": (ctypes.POINTER(_pointer), _int, UniqueId, _int),
    "ncclAllReduce": (_pointer, _pointer, _size, _int, _int, _pointer, _pointer),
    "ncclAllGather": (_pointer, _pointer, _size, _int, _pointer, _pointer),
    "ncclBroadcast": (_pointer, _pointer, _size, _int, _int, _pointer, _pointer),
}


class NcclError(LockstepError):
    """NCCL refused a call, or the device failed."""


class NcclPeerLost(PeerLost):
    """NCCL lost the connection to another rank."""


class Nccl:
    """A loaded library with checked calls."""

    def __init__(self, handle: Any) -> None:
        """handle: a CDLL. Raises ConfigError when it is too old."""
        self._functions: dict[str, Callable[..., int]] = {}
        for name, arguments in FUNCTIONS.items():
            try:
                function = getattr(handle, name)
            except AttributeError as error:
                raise ConfigError(f"communicator: {LIBRARY} has no {name}: {_wanted()}") from error
            function.argtypes, function.restype = arguments, _int
            self._functions[name] = function
        self._describe = handle.ncclGetErrorString
        self._describe.argtypes, self._describe.restype = (_int,), ctypes.c_char_p
        number = _int()
        self("ncclGetVersion", ctypes.byref(number))
        self.version = _version(number.value)
        if self.version < OLDEST:
            raise ConfigError(f"communicator: {LIBRARY} is {'.'.join(map(str, self.version))}: {_wanted()}")

    def __call__(self, name: str, *arguments: Any) -> None:
        """Raises NcclPeerLost for a lost connection, NcclError for any other result than success."""
        result = self._functions[name](*arguments)
        if result:
            error = NcclPeerLost if result in (SYSTEM_ERROR, REMOTE_ERROR) else NcclError
            raise error(f"{name} failed: {self._describe(result).decode()} (result {result})")


def load() -> Nccl:
    """The library that torch has loaded or would load. Raises ConfigError when there is none or it is too old."""
    try:
        return Nccl(ctypes.CDLL(_path()))
    except OSError as error:
        raise ConfigError(f"communicator: {LIBRARY} cannot be loaded ({error}): {_wanted()}") from error


def _path() -> str:
    """A CUDA build of torch brings NCCL as a package; loading the same file again gives the same library."""
    package = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    for folder in (package.submodule_search_locations or ()) if package else ():
        path = Path(folder) / "lib" / LIBRARY
        if path.is_file():
            return str(path)
    return LIBRARY


def _wanted() -> str:
    return f"install NCCL {'.'.join(map(str, OLDEST))} or later, or set --communicator torch"


def _version(number: int) -> tuple[int, int, int]:
    """NCCL's own coding, which changed with 2.9."""
    major, rest = divmod(number, 10_000 if number >= 10_000 else 1_000)
    return major, rest // 100, rest % 100
