"""Checkpoints of single tensors, and shards of them, for tests."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from services.worker.weights.folder import ModelFolder
from services.worker.weights.loader import load
from services.worker.weights.shards import Shard


def write(folder: Path, *files: Mapping[str, Tensor], config: Mapping[str, object] | None = None) -> Path:
    """A model folder with one safetensors file or, with an index, several."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}))
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors" for number in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        save_file(dict(tensors), folder / name)
    if len(files) > 1:
        weight_map = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_raw(file: Path, header: bytes, data: bytes = b"", size: int | None = None) -> None:
    """A safetensors file, or something like one."""
    file.write_bytes(struct.pack("<Q", len(header) if size is None else size) + header + data)


def shard(name: str, shape: tuple[int, ...], *index: slice, dtype: torch.dtype = torch.float32) -> Shard:
    """All of the dimensions that `index` does not name; the target holds NaN."""
    index += (slice(None),) * (len(shape) - len(index))
    return Shard(
        name, shape, index, torch.full([len(range(size)[part]) for size, part in zip(shape, index, strict=True)], torch.nan).to(dtype)
    )


def loaded(folder: Path, *shards: Shard) -> list[Tensor]:
    load(ModelFolder(folder), shards, lambda phase, part: None, lambda name: False)
    return [each.target for each in shards]
