"""A GGUF file as typed metadata and named tensors: every way in which it can be wrong is one typed error."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from gguf import GGUFReader, GGUFValueType, ReaderField, ReaderTensor

from shared.errors import LockstepError

Value = TypeVar("Value", int, float, str, bool)


class GGUFError(LockstepError):
    """A GGUF file cannot be converted."""


class InvalidGGUF(GGUFError):
    """The file contradicts itself or is incomplete: fetch it again, or write it anew."""


class UnsupportedGGUF(GGUFError):
    """The file is sound, but what it holds has no counterpart here."""


class Metadata:
    """The file's key-value pairs. A value of another type than the one asked for is InvalidGGUF, naming the key."""

    def __init__(self, fields: Mapping[str, ReaderField]) -> None:
        self._fields = fields

    def names(self, prefix: str) -> set[str]:
        """The keys that begin with `prefix`, without it."""
        return {key.removeprefix(prefix) for key in self._fields if key.startswith(prefix)}

    def optional(self, key: str, kind: type[Value]) -> Value | None:
        """The scalar or string at `key`, None where the file has no such key."""
        field = self._fields.get(key)
        if field is None:
            return None
        value = field.contents()
        if type(value) is not kind:  # not isinstance: True is an int
            raise InvalidGGUF(f"{key} must be one {kind.__name__}, got {str(value)[:80]!r}")
        return value

    def required(self, key: str, kind: type[Value]) -> Value:
        value = self.optional(key, kind)
        if value is None:
            raise InvalidGGUF(f"the key {key} is missing")
        return value

    def array(self, key: str, kind: type[Value]) -> list[Value]:
        field = self._fields.get(key)
        if field is None:
            raise InvalidGGUF(f"the key {key} is missing")
        values = field.contents()
        if field.types[0] is not GGUFValueType.ARRAY or any(type(value) is not kind for value in values):
            raise InvalidGGUF(f"{key} must be an array of {kind.__name__}")
        return list(values)


class GGUFFile(NamedTuple):
    metadata: Metadata
    tensors: dict[str, ReaderTensor]  # data is a view of the mapped file, still quantised


def open_gguf(path: Path) -> GGUFFile:
    """Maps the file and reads its header; tensor data is read when touched.

    Raises InvalidGGUF for anything that is not a complete GGUF file, FileNotFoundError where there is none.
    """
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:  # what the reader lets through when offsets lead past the end
        raise InvalidGGUF(f"{path.name} is not a complete GGUF file ({path.stat().st_size} bytes): {error}") from error
    return GGUFFile(Metadata(reader.fields), {tensor.name: tensor for tensor in reader.tensors})
