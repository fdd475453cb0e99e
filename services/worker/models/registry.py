"""Model families by the name in `architectures[0]` of a config.json."""

import pkgutil
from collections.abc import Callable, Set
from dataclasses import replace
from importlib import import_module
from typing import TypeVar

from services.worker import models
from services.worker.models.config import HFConfig, ModelConfig, read_config
from services.worker.models.decoder import Decoder
from shared.errors import ConfigError

_FAMILIES: dict[str, type[Decoder]] = {}
F = TypeVar("F", bound=type[Decoder])


def register(architecture: str) -> Callable[[F], F]:
    """Names the decorated family for `family`."""

    def add(cls: F) -> F:
        _FAMILIES[architecture] = cls
        return cls

    return add


def families() -> dict[str, type[Decoder]]:
    """All classes by architecture: every file of this folder may add one."""
    for module in pkgutil.iter_modules(models.__path__, f"{models.__name__}."):
        import_module(module.name)
    return _FAMILIES


def family(hf: HFConfig) -> type[Decoder]:
    """The class of a model. Raises ConfigError naming those supported."""
    names = hf.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else "(none)"
    known = families()
    if architecture not in known:
        raise ConfigError(f"architecture {architecture:.80} is not supported; supported: {', '.join(sorted(known))}")
    return known[architecture]


def describe(hf: HFConfig, tensors: Set[str]) -> tuple[type[Decoder], ModelConfig, list[str]]:
    """Family and shape of a checkpoint that holds `tensors`, and what its owner should be told.

    Raises ConfigError for what the family does not support.
    """
    cls = family(hf)
    config, unknown = read_config(cls.fields, hf)
    remarks = [f"config.json: unknown fields without effect: {', '.join(unknown)}"] if unknown else []
    heads = sorted(name for name in tensors if name.endswith("lm_head.weight"))
    if config.tied_embeddings is None:
        config = replace(config, tied_embeddings=not heads)
    elif config.tied_embeddings and heads:
        remarks.append(f"{heads[0]} is not used: tie_word_embeddings makes the embedding the head")
    return cls, config, remarks
