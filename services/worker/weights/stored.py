"""Safetensors files, read without torch: what their headers say, checked against the files, and where each tensor lies.

8 bytes: the header's size | the header, JSON: name -> dtype, shape, offsets in the data | the data
"""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, NonNegativeInt, TypeAdapter, ValidationError

from shared.errors import ConfigError

MAX_HEADER_BYTES = 100 << 20  # the format's own bound
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # of the dtypes that weights are loaded from


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, row-major and contiguous."""

    file: Path
    name: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


class _Entry(BaseModel):
    dtype: str
    shape: list[NonNegativeInt]
    data_offsets: tuple[NonNegativeInt, NonNegativeInt]


_ENTRIES = TypeAdapter(dict[str, _Entry])


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name. Raises ConfigError, naming file and tensor, for what cannot be whole."""
    try:
        with file.open("rb") as stream:
            begin = stream.read(8)
            if begin == b"version ":
                raise ConfigError(f"{file}: a pointer of Git LFS, not the file: fetch it with git lfs pull")
            (size,) = struct.unpack("<Q", begin)
            if size > MAX_HEADER_BYTES:
                raise ConfigError(f"{file}: a header of {size} bytes is no safetensors header")
            content = json.loads(stream.read(size))
            if isinstance(content, dict):
                content.pop("__metadata__", None)
            entries = _ENTRIES.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{file}: not a safetensors file: {'.'.join(map(str, first['loc']))[:200]}: {first['msg']}") from error
    except (OSError, ValueError, RecursionError, struct.error) as error:
        raise ConfigError(f"{file}: not a safetensors file: {error}") from error
    data, file_bytes = 8 + size, file.stat().st_size
    for name, entry in entries.items():
        start, end = entry.data_offsets
        if data + end > file_bytes:
            raise ConfigError(f"{file}: {name} ends at byte {data + end} of a file of {file_bytes}: truncated? copy it again")
        if entry.dtype in DTYPE_BYTES and math.prod(entry.shape) * DTYPE_BYTES[entry.dtype] != end - start:
            raise ConfigError(f"{file}: {name} {entry.shape} of {entry.dtype} does not fit its {end - start} bytes: the header is damaged")
    return {
        name: StoredTensor(file, name, entry.dtype, tuple(entry.shape), data + entry.data_offsets[0]) for name, entry in entries.items()
    }
