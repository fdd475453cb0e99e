"""A model folder in Hugging Face's layout, without its weights in memory and without torch."""

import hashlib
import json
import struct
from functools import cached_property
from pathlib import Path
from typing import Any

from services.worker.models.config import HFConfig, read_json
from shared.errors import ConfigError
from shared.protocol.files import ModelFile

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
MAX_HEADER_BYTES = 100 << 20  # of a safetensors file; the format's own bound


class ModelFolder:
    """Raises ConfigError, naming the file, for what is missing or unreadable."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ConfigError(f"model: {path} is no folder")
        self.path = path
        self.config: HFConfig = read_json(path / "config.json")

    @cached_property
    def text_files(self) -> list[ModelFile]:
        """What gateways need: tokenizer, chat template, generation config."""
        files = [ModelFile(name, (self.path / name).read_bytes()) for name in TEXT_FILES if (self.path / name).is_file()]
        if not any(file.name == "tokenizer.json" for file in files):
            raise ConfigError(f"{self.path}: no tokenizer.json")
        return files

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The union of what config.json, generation_config.json and the tokenizer call the end: each may name one of its own."""
        found: set[int] = set()
        for source in (self.config, self._optional("generation_config.json")):
            value = source.get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
        token = self._optional("tokenizer_config.json").get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        for added in self._optional("tokenizer.json").get("added_tokens", []):
            if added["content"] == content:
                found.add(added["id"])
        return tuple(sorted(found))

    @cached_property
    def tensors(self) -> dict[str, Path]:
        """Which safetensors file holds each tensor."""
        holders: dict[str, Path] = {}
        for file in self.weight_files:
            for name in _header(file):
                if name in holders:
                    raise ConfigError(f"{name} is in {holders[name].name} and in {file.name}")
                holders[name] = file
        return holders

    @property
    def weight_files(self) -> list[Path]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            files = sorted({self.path / name for name in read_json(index).get("weight_map", {}).values()})
        else:
            files = [self.path / "model.safetensors"]
        for file in files:
            if not file.is_file():
                raise ConfigError(f"{self.path}: no {file.name}")
        return files

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over config.json, tensor names, shapes, dtypes and the hashes of the text files: equal groups are interchangeable."""
        tensors = {name: [entry["dtype"], entry["shape"]] for file in self.weight_files for name, entry in sorted(_header(file).items())}
        content = {"config": self.config, "tensors": tensors, "files": {file.name: file.sha256 for file in self.text_files}}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _optional(self, name: str) -> dict[str, Any]:
        return read_json(self.path / name) if (self.path / name).is_file() else {}


def _header(file: Path) -> dict[str, Any]:
    """Names, dtypes and shapes of a safetensors file: 8 bytes of size, then JSON."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > MAX_HEADER_BYTES:
                raise ConfigError(f"{file}: a header of {size} bytes is no safetensors header")
            header: dict[str, Any] = json.loads(stream.read(size))
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"{file}: not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return header
