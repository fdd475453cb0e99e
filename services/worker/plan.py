"""`python -m services.worker.plan CONFIG`: does a model fit, on how many GPUs, and how many requests of which length then.

From the model's shape and the GPU's data sheet, before anything is downloaded; a worker at its start measures instead.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from services.worker.engine.roofline import CACHE_SHARE, GPUS, Roofline, Shape
from shared.command import exit_status
from shared.errors import ConfigError

CONTEXTS = (1024, 4096, 16_384, 65_536)
BATCHES = (1, 32, 256)
GRAPHS_GB = 1.5  # of each GPU, for captured steps and what libraries keep
PAGE_SIZE = 16


def shape_of(path: Path) -> Shape:
    """Of a config.json or of the folder that holds one. Raises ConfigError when it cannot be read."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"config: {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"config: {path} is no JSON object")
    return Shape.from_config(config.get("text_config", config))


def ranks_that_fit(shape: Shape) -> Iterator[int]:
    """Numbers of ranks over which the KV heads spread: they divide them, or are a multiple, with copies."""
    for ranks in range(1, 65):
        if not shape.heads % ranks and (not shape.kv_heads % ranks or not ranks % shape.kv_heads):
            yield ranks


def room_bytes(shape: Shape, gpu: str, ranks: int) -> float:
    """For the KV cache, in all GPUs together; negative when the weights do not fit."""
    each = CACHE_SHARE * GPUS[gpu].memory_gb * 1e9 - GRAPHS_GB * 1e9
    return ranks * each - shape.weight_bytes


def describe(shape: Shape, gpu: str, ranks: int | None) -> Iterator[str]:
    """Lines of the answer. Raises ConfigError when the model does not fit, or not on so many GPUs."""
    possible = list(ranks_that_fit(shape))
    if ranks is None:
        ranks = next((each for each in possible if room_bytes(shape, gpu, each) > 0), None)
        if ranks is None:
            raise ConfigError(f"gpu: {shape.weight_bytes / 1e9:.0f} GB of weights fit on no number of {gpu} up to 64")
    if ranks not in possible:
        heads = f"{shape.heads} heads and {shape.kv_heads} KV heads"
        raise ConfigError(f"tensor_parallel_size: {heads} spread over {possible}, not over {ranks}")
    room = room_bytes(shape, gpu, ranks)
    if room <= 0:
        raise ConfigError(f"tensor_parallel_size: {shape.weight_bytes / 1e9:.0f} GB of weights do not fit in {ranks} x {gpu}")
    copies = max(1, ranks // shape.kv_heads)  # a KV head that several ranks hold is held several times
    token_bytes = shape.kv_bytes_per_token * copies
    tokens = int(room // token_bytes) // PAGE_SIZE * PAGE_SIZE
    yield f"weights      {shape.weight_bytes / 1e9:.1f} GB in bfloat16, {shape.weight_bytes / 1e9 / ranks:.1f} GB a GPU"
    yield f"KV cache     {token_bytes / 1024:.0f} KiB a token, {tokens:,} tokens in all"
    yield f"GPUs         {ranks} x {gpu} of {GPUS[gpu].memory_gb:g} GB; {CACHE_SHARE:.0%} used, {GRAPHS_GB:g} GB of each for captured steps"
    yield ""
    yield "context   requests at a time"
    for context in CONTEXTS:
        if context <= tokens:
            yield f"{context:>7}   {tokens // context:,}"
    yield ""
    yield "batch     step at context 1024, estimated     tokens/s"
    roofline = Roofline(GPUS[gpu], shape, ranks)
    for batch in BATCHES:
        if batch * 1024 <= tokens:
            us = roofline.step_us(batch, batch, batch * 1024, batch * 1024)
            yield f"{batch:>5}     {us / 1000:.1f} ms{batch * 1e6 / us:>32,.0f}"
    yield ""
    requests = min(256, max(1, 2 ** int(math.log2(max(1, tokens // 2048)))))
    yield f"helm install lockstep helm/lockstep --set parallelism.tp={ranks} --set worker.settings.max_num_seqs={requests}"


def main() -> int:
    parser = argparse.ArgumentParser("lockstep plan", description="Does a model fit, on how many GPUs, and how many requests then?")
    parser.add_argument("config", type=Path, help="the model's config.json, or its folder")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h200")
    parser.add_argument("--tensor-parallel-size", type=int, help="GPUs of a group; default: as few as it fits on")
    given = parser.parse_args()
    return exit_status(parser.prog, lambda: print("\n".join(describe(shape_of(given.config), given.gpu, given.tensor_parallel_size))))


if __name__ == "__main__":
    sys.exit(main())
