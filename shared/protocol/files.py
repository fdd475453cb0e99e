"""The model's text files (tokenizer, chat template, generation config) on their way from the worker to the gateways.

Both contracts send them alike: a manifest, then chunks in its order. They are small enough to hold in memory.
"""

import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from shared.errors import ProtocolError

CHUNK_BYTES = 1 << 20
MAX_FILES = 32
MAX_TOTAL_BYTES = 256 << 20


@dataclass(frozen=True)
class ModelFile:
    name: str  # a bare file name
    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def messages(files: Sequence[ModelFile], response: Any) -> Iterator[Any]:
    """The stream of `response` messages, GenerationFilesResponse or ExecutionFilesResponse, that carries `files`."""
    entries = [response.File(name=file.name, size=len(file.data), sha256=file.sha256) for file in files]
    yield response(manifest=response.Manifest(files=entries))
    for file in files:
        for start in range(0, len(file.data), CHUNK_BYTES):
            yield response(chunk=file.data[start : start + CHUNK_BYTES])


async def receive(stream: AsyncIterator[Any]) -> list[ModelFile]:
    """The files of such a stream. Raises ProtocolError for a bad name, too much data, or a file that does not match its hash."""
    manifest: Any = None
    data = bytearray()
    async for message in stream:
        if manifest is None:
            manifest = _checked_manifest(message)
            total = sum(file.size for file in manifest.files)
        else:
            data += message.chunk
            if len(data) > total:
                raise ProtocolError(f"the files are longer than the {total} bytes announced")
    if manifest is None or len(data) != total:
        raise ProtocolError("the stream of files ended early")
    files, start = [], 0
    for entry in manifest.files:
        file = ModelFile(entry.name, bytes(data[start : start + entry.size]))
        if file.sha256 != entry.sha256:
            raise ProtocolError(f"{entry.name} does not match its SHA-256")
        files.append(file)
        start += entry.size
    return files


def _checked_manifest(message: Any) -> Any:
    if message.WhichOneof("message") != "manifest":
        raise ProtocolError("the stream of files does not begin with a manifest")
    entries = message.manifest.files
    if len(entries) > MAX_FILES or sum(entry.size for entry in entries) > MAX_TOTAL_BYTES:
        raise ProtocolError(f"more than {MAX_FILES} files or {MAX_TOTAL_BYTES} bytes announced")
    for entry in entries:
        if not entry.name or PurePath(entry.name).name != entry.name or entry.name in (".", ".."):
            raise ProtocolError(f"{entry.name[:100]!r} is no bare file name")
    return message.manifest
