"""A model folder in Hugging Face's layout, without its weights in memory and without torch."""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from services.worker.models.config import HFConfig, read_json, told
from services.worker.weights.stored import StoredTensor, read_header
from shared.errors import ConfigError
from shared.protocol.files import ModelFile

LoadFormat = Literal["auto", "random"]

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TokenId = Annotated[int, Field(ge=0, lt=2**31)]  # int32 on the device
QUANTISED = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")  # left by AutoGPTQ, AutoAWQ and ModelOpt


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True)


F = TypeVar("F", bound=_Fields)


class _Ends(_Fields):
    """Of config.json and generation_config.json."""

    eos_token_id: list[TokenId] = []
    text_config: "_Ends | None" = None  # beside an image model, the language model has a config of its own

    @field_validator("eos_token_id", mode="before")
    @classmethod
    def one_or_several(cls, value: object) -> object:
        return value if isinstance(value, list) else [] if value is None else [value]


class _TokenizerConfig(_Fields):
    eos_token: str | None = None

    @field_validator("eos_token", mode="before")
    @classmethod
    def content(cls, value: object) -> object:
        return value.get("content") if isinstance(value, dict) else value


class _AddedToken(_Fields):
    id: TokenId
    content: str


class _Tokenizer(_Fields):
    added_tokens: list[_AddedToken] = []


class ModelFolder:
    """Raises ConfigError, naming the file, for what is missing or unreadable."""

    def __init__(self, path: Path, load_format: LoadFormat = "auto") -> None:
        """load_format: `random` looks at no weight files, there need be none."""
        if not path.is_dir():
            raise ConfigError(f"model: {path} is no folder")
        self.path, self.load_format = path, load_format
        self.config: HFConfig = read_json(path / "config.json")

    @cached_property
    def text_files(self) -> list[ModelFile]:
        """What gateways need: tokenizer, chat template, generation config. Of random weights nobody expects text."""
        files = [ModelFile(name, (self.path / name).read_bytes()) for name in TEXT_FILES if (self.path / name).is_file()]
        if self.load_format != "random" and not any(file.name == "tokenizer.json" for file in files):
            raise ConfigError(f"{self.path}: no tokenizer.json")
        return files

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The union of what config.json, generation_config.json and the tokenizer call the end: each may name one of its own."""
        config, generation = self._fields(_Ends, "config.json"), self._fields(_Ends, "generation_config.json")
        token = self._fields(_TokenizerConfig, "tokenizer_config.json").eos_token
        found = {added.id for added in self._fields(_Tokenizer, "tokenizer.json").added_tokens if added.content == token}
        for ends in (config, config.text_config, generation):
            found.update(ends.eos_token_id if ends else [])
        return tuple(sorted(found))

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """The checkpoint's tensors by name, file after file; none when weights are random."""
        found: dict[str, StoredTensor] = {}
        for file in self.weight_files:
            for name, tensor in read_header(file).items():
                if name in found:
                    raise ConfigError(f"{name} is in {found[name].file.name} and in {file.name}")
                found[name] = tensor
        return found

    @cached_property
    def weight_files(self) -> list[Path]:
        """The safetensors files: those of the index or, without one, `model.safetensors` or all of that layout."""
        if self.load_format == "random":
            return []
        for name in QUANTISED:
            if (self.path / name).is_file():
                raise ConfigError(f"{self.path}: {name} says that the weights are quantised, which is not supported")
        if (self.path / INDEX).is_file():
            return self._indexed()
        single = self.path / "model.safetensors"
        files = [single] if single.is_file() else sorted(self.path.glob("model*.safetensors"))
        if not files:
            raise ConfigError(f"{self.path}: {self._without_weights()}")
        return files

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over config.json, tensor names, shapes, dtypes and the hashes of the text files: equal groups are interchangeable."""
        tensors = {name: [tensor.dtype, tensor.shape] for name, tensor in sorted(self.tensors.items())}
        content = {
            "config": self.config,
            "tensors": "random" if self.load_format == "random" else tensors,
            "files": {file.name: file.sha256 for file in self.text_files},
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def _indexed(self) -> list[Path]:
        weight_map = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
            raise ConfigError(f"{self.path / INDEX}: no weight_map from tensors to files")
        names = sorted(set(weight_map.values()))
        for name in names:
            if name != Path(name).name or not (self.path / name).is_file():
                raise ConfigError(f"{self.path}: no {name}, which {INDEX} names")
        return [self.path / name for name in names]

    def _without_weights(self) -> str:
        """Why there is nothing to load."""
        if any(self.path.glob("consolidated*.safetensors")):
            return "only consolidated.safetensors, Mistral's own layout: the files model*.safetensors are needed"
        for pattern in PICKLES:
            for file in sorted(self.path.glob(pattern)):
                return f"{file.name} is a pickle, which can run code when it is read: convert the checkpoint to safetensors"
        return "no model.safetensors"

    def _fields(self, kind: type[F], name: str) -> F:
        """Of a file that need not be there."""
        path = self.path / name
        content: dict[str, Any] = read_json(path) if path.is_file() else {}
        try:
            return kind.model_validate(content)
        except ValidationError as error:
            raise ConfigError(f"{path}: {told(error)}") from error
