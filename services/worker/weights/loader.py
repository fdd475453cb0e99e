"""Loads a rank's shard of a checkpoint: slice by slice from the safetensors files, never a whole tensor or file in memory."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.worker.engine.interface import Progress
from services.worker.weights.folder import ModelFolder
from services.worker.weights.shards import Shard
from shared.errors import ConfigError

IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # old checkpoints hold this table, which follows from the config


def load(folder: ModelFolder, shards: Iterable[Shard], progress: Progress) -> None:
    """Fills every shard's target. Raises ConfigError naming all tensors that are missing, misshapen or left over."""
    wanted = list(shards)
    names = {shard.name for shard in wanted}
    missing = sorted(names - folder.tensors.keys())
    left_over = sorted(name for name in folder.tensors.keys() - names if not name.endswith(IGNORED_SUFFIXES))
    if missing or left_over:
        raise ConfigError(f"{folder.path}: tensors missing: {_listed(missing)}; not of this architecture: {_listed(left_over)}")
    wanted.sort(key=lambda shard: folder.tensors[shard.name])
    done = 0
    for file, group in groupby(wanted, key=lambda shard: folder.tensors[shard.name]):
        try:
            with safe_open(file, framework="pt") as tensors:
                for shard in group:
                    _copy(tensors.get_slice(shard.name), shard)
                    done += 1
                    progress("loading weights", done / len(wanted))
        except SafetensorError as error:
            raise ConfigError(f"{file}: {error}") from error


def _copy(source: Any, shard: Shard) -> None:
    shape = tuple(source.get_shape())
    if shape != shard.shape:
        raise ConfigError(f"{shard.name} has shape {list(shape)}, the config wants {list(shard.shape)}")
    part: torch.Tensor = source[shard.index]
    if not part.is_floating_point():
        raise ConfigError(f"{shard.name} has dtype {part.dtype}: quantised checkpoints are not supported")
    shard.target.copy_(part)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"
