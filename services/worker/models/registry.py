"""Model families by the name in `architectures[0]` of a config.json."""

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import TypeVar

from services.worker import models
from services.worker.models.config import HFConfig
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


def family(hf: HFConfig) -> type[Decoder]:
    """The class of a model: every file of this folder may add one. Raises ConfigError naming those supported."""
    for module in pkgutil.iter_modules(models.__path__, f"{models.__name__}."):
        import_module(module.name)
    architecture = (hf.get("architectures") or ["(none)"])[0]
    if architecture not in _FAMILIES:
        raise ConfigError(f"architecture {architecture} is not supported; supported: {', '.join(sorted(_FAMILIES))}")
    return _FAMILIES[architecture]
