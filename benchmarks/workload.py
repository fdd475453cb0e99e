"""What the benchmarks compute that are compared with other engines: prompts, lengths, shapes of models.

The offline task is Mini-SGLang's: 256 prompts of 100 to 1,024 ids, as many new tokens for each, drawn from Python's generator with seed 0.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError

SHAPES = Path(__file__).with_name("shapes")
HIGHEST_ID = 10_000  # of prompts

Prompts = list[list[int]]


@dataclass(frozen=True)
class Task:
    """Prompts, and how many tokens each should yield."""

    prompts: Prompts
    max_tokens: list[int]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.max_tokens)


def offline_task(prompts: int = 256, least: int = 100, most: int = 1024, vocab_size: int = HIGHEST_ID + 1, run: int = 0) -> Task:
    """Lengths uniform in `[least, most]`. Later runs have the same lengths and other ids: no prompt comes twice."""
    highest, generator = min(HIGHEST_ID, vocab_size - 1), random.Random(0)
    first = [[generator.randint(0, highest) for _ in range(generator.randint(least, most))] for _ in range(prompts)]
    max_tokens = [generator.randint(least, most) for _ in range(prompts)]
    return Task(fresh(map(len, first), vocab_size, 1000 + run) if run else first, max_tokens)


def fresh(lengths: Iterable[int], vocab_size: int, seed: int) -> Prompts:
    """Prompts of these lengths; another seed has other ids."""
    generator, highest = random.Random(seed), min(HIGHEST_ID, vocab_size - 1)
    return [[generator.randint(0, highest) for _ in range(length)] for length in lengths]


def config_file(model: str) -> Path:
    """The config.json of a shape by its name, or of a model folder. Raises ConfigError."""
    shape, folder = SHAPES / f"{model}.json", Path(model)
    if shape.is_file():
        return shape
    if (folder / "config.json").is_file():
        return folder / "config.json"
    known = ", ".join(sorted(path.stem for path in SHAPES.glob("*.json")))
    raise ConfigError(f"model: {model} is neither a shape ({known}) nor a folder with a config.json")
