"""The binding of libnccl: its signatures against nccl.h, its errors. No GPU and no NCCL: the library's double has its C interface."""

import ctypes
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.worker.distributed import nccl
from services.worker.distributed.communicator import communicator
from services.worker.distributed.nccl import Nccl, NcclError, NcclPeerLost, UniqueId
from shared.errors import ConfigError

DECLARATIONS = """
ncclGetVersion(int* version);
ncclGetUniqueId(ncclUniqueId* uniqueId);
ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank);
ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
    cudaStream_t stream);
ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream);
ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
    cudaStream_t stream);
"""
C_TYPES: dict[str, Any] = {
    "int*": ctypes.POINTER(ctypes.c_int),
    "ncclUniqueId*": ctypes.POINTER(UniqueId),
    "ncclComm_t*": ctypes.POINTER(ctypes.c_void_p),
    "const void*": ctypes.c_void_p,
    "void*": ctypes.c_void_p,
    "ncclComm_t": ctypes.c_void_p,  # both point to what only NCCL and CUDA know
    "cudaStream_t": ctypes.c_void_p,
    "size_t": ctypes.c_size_t,
    "int": ctypes.c_int,
    "ncclDataType_t": ctypes.c_int,  # enumerations
    "ncclRedOp_t": ctypes.c_int,
    "ncclUniqueId": UniqueId,
}


def library(version: int = 22703, results: dict[str, int] | None = None, without: str = "") -> SimpleNamespace:
    """A libnccl whose functions give these results, and note how they were called."""
    calls: list[tuple[Any, ...]] = []

    def function(name: str) -> Any:
        def called(*arguments: Any) -> int:
            calls.append((name, *arguments))
            if name == "ncclGetVersion":
                arguments[0][0] = version
            return (results or {}).get(name, 0)

        return ctypes.CFUNCTYPE(ctypes.c_int, *nccl.FUNCTIONS[name])(called)

    names = nccl.FUNCTIONS.keys() - {without}
    describe = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(lambda result: ctypes.cast(DESCRIPTION, ctypes.c_void_p).value)
    return SimpleNamespace(**{name: function(name) for name in names}, ncclGetErrorString=describe, calls=calls)


DESCRIPTION = ctypes.create_string_buffer(b"what NCCL says of it")


def test_signatures_are_those_of_nccl_h() -> None:
    declared = {
        name: tuple(C_TYPES[re.sub(r"\s*\w+$", "", argument.strip())] for argument in arguments.split(","))
        for name, arguments in re.findall(r"(\w+)\(([^)]*)\);", DECLARATIONS)
    }
    assert declared == nccl.FUNCTIONS
    assert ctypes.sizeof(UniqueId) == 128


def test_arguments_arrive_and_success_is_silent() -> None:
    double = library()
    loaded = Nccl(double)
    assert loaded.version == (2, 27, 3)
    loaded("ncclAllReduce", 1 << 40, 1 << 41, 1 << 33, nccl.DATA_TYPES["bfloat16"], nccl.SUM, ctypes.c_void_p(7), 9)
    assert double.calls[-1] == ("ncclAllReduce", 1 << 40, 1 << 41, 1 << 33, 9, 0, 7, 9)
    identity = UniqueId.from_buffer_copy(bytes(range(128)))
    loaded("ncclCommInitRank", ctypes.byref(ctypes.c_void_p()), 4, identity, 3)
    assert bytes(double.calls[-1][3]) == bytes(range(128))
    assert (double.calls[-1][2], double.calls[-1][4]) == (4, 3)


@pytest.mark.parametrize("result, error", [(1, NcclError), (2, NcclPeerLost), (4, NcclError), (5, NcclError), (6, NcclPeerLost)])
def test_results_are_errors(result: int, error: type[Exception]) -> None:
    loaded = Nccl(library(results={"ncclAllGather": result}))
    with pytest.raises(error, match=rf"ncclAllGather failed: what NCCL says of it \(result {result}\)"):
        loaded("ncclAllGather", None, None, 0, 7, None, None)


@pytest.mark.parametrize("number, version", [(2708, "2.7.8"), (21000, "2.10.0")])
def test_an_old_library_is_refused(number: int, version: str) -> None:
    with pytest.raises(ConfigError, match=rf"libnccl\.so\.2 is {version}: install NCCL 2\.10\.3 or later, or set --communicator torch"):
        Nccl(library(version=number))


def test_a_library_without_a_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no ncclBroadcast"):
        Nccl(library(without="ncclBroadcast"))


def test_a_missing_library_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "LIBRARY", "libnccl-absent.so.2")
    with pytest.raises(ConfigError, match=r"libnccl-absent\.so\.2 cannot be loaded \(.*\): install NCCL"):
        nccl.load()


def test_pynccl_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="communicator: pynccl is for GPUs"):
        communicator(0, 2, "file:///nowhere", torch.device("cpu"), "pynccl")
