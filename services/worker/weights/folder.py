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
    """Of tokenizer_config.json and, older, special_tokens_map.json."""

    eos_token: str | None = None

    @field_validator("eos_token", mode="before")
    @classmethod
    def content(cls, value: object) -> object:
        return value.get("content") if isinstance(value, dict) else value


class _AddedToken(_Fields):
    id: TokenId
    content: str


class _TokenizerModel(_Fields):
    vocab: dict[str, TokenId] | list[Any] | None = None  # by id in a Unigram model: a piece and its score each


class _Tokenizer(_Fields):
    added_tokens: list[_AddedToken] = []
    model: _TokenizerModel = _TokenizerModel()

    def id_of(self, token: str) -> int | None:
        """None for a token that is none."""
        if (found := next((added.id for added in self.added_tokens if added.content == token), None)) is not None:
            return found
        if isinstance(self.model.vocab, dict):
            return self.model.vocab.get(token)
        return next((id_ for id_, piece in enumerate(self.model.vocab or ()) if isinstance(piece, list) and piece[:1] == [token]), None)


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
            slow = (self.path / "tokenizer.model").is_file()
            told = ", and tokenizer.model is not read: let transformers save the tokenizer, which makes one of it" if slow else ""
            raise ConfigError(f"{self.path}: no tokenizer.json{told}")
        return files

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The union of what config.json, generation_config.json and the tokenizer call the end: each may name one of its own."""
        config, generation = self._fields(_Ends, "config.json"), self._fields(_Ends, "generation_config.json")
        named = [self._fields(_TokenizerConfig, name).eos_token for name in ("tokenizer_config.json", "special_tokens_map.json")]
        token = next(filter(None, named), None)
        tokenizer = self._fields(_Tokenizer, "tokenizer.json")
        found = set() if token is None or (id_ := tokenizer.id_of(token)) is None else {id_}
        for ends in (config, config.text_config, generation):
            found.update(ends.eos_token_id if ends else [])
        return tuple(sorted(found))

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """The checkpoint's tensors by name, file after file; none when weights are random. Of one that is in two files, the index's."""
        found: dict[str, StoredTensor] = {}
        for file in self.weight_files:
            for name, tensor in read_header(file).items():
                owner = self._index.get(name)
                if name in found and owner not in (found[name].file.name, file.name):
                    raise ConfigError(f"{name} is in {found[name].file.name} and in {file.name}")
                if name not in found or owner == file.name:
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
        if self._index:
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

    @cached_property
    def _index(self) -> dict[str, str]:
        """From tensors to files; empty without an index."""
        if not (self.path / INDEX).is_file():
            return {}
        weight_map = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
            raise ConfigError(f"{self.path / INDEX}: no weight_map from tensors to files")
        return weight_map

    def _indexed(self) -> list[Path]:
        names = sorted(set(self._index.values()))
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
