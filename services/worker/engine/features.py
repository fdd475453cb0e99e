"""What sampling the rows of a step ask for, as the host knows it from their admissions: it picks how much a step computes.

A row's token depends on what the row itself asks for: a step that can do more than a row needs gives it the same token.
"""

from collections.abc import Callable
from enum import IntFlag
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.noise import GREEDY_BELOW
from shared.protocol.plan import SlotFlag


class Feature(IntFlag):
    SAMPLING = 1  # a temperature
    LEAST_LENGTH = 2  # ids that are forbidden while the row is short
    PENALTIES = 4  # or biases
    LOGPROBS = 8  # of the row's tokens
    FILTERS = 16  # a top-k, top-p or min-p, with a temperature


NO_FEATURES = Feature(0)
ALL_SAMPLING = Feature.SAMPLING | Feature.FILTERS
# What captured steps can do: the first that covers a step's features is replayed.
VARIANTS = (
    NO_FEATURES,
    ALL_SAMPLING,
    ALL_SAMPLING | Feature.LEAST_LENGTH,
    ALL_SAMPLING | Feature.LEAST_LENGTH | Feature.PENALTIES,
    ALL_SAMPLING | Feature.LEAST_LENGTH | Feature.PENALTIES | Feature.LOGPROBS,
)


def wants_of(field: Callable[[str], Any]) -> tuple[Any, Any, Any]:
    """field: of admissions by its name, in NumPy or torch -> which of them are filtered, start below their least length, and are penalised
    or biased, each `[A]` bool. Any of it takes a row's logits."""
    random = field("temperature") >= GREEDY_BELOW.value
    filtered = random & ((field("top_k") > 0) | (field("top_p") < 1) | (field("min_p") > 0))
    changed = (field("flags") & (SlotFlag.PENALTIES | SlotFlag.BIASES)) != 0
    return filtered, field("min_length") > field("prompt_length"), changed


class SlotFeatures:
    """By slot, since its admission."""

    def __init__(self, slots: int) -> None:
        self._features = np.zeros(slots, dtype=np.int32)

    def admit(self, admissions: NDArray[np.void]) -> None:
        sampling = (admissions["temperature"] >= GREEDY_BELOW.value) * int(Feature.SAMPLING)
        logprobs = ((admissions["flags"] & SlotFlag.LOGPROBS) != 0) * int(Feature.LOGPROBS)
        filtered, short, changed = wants_of(admissions.__getitem__)
        wants = filtered * int(Feature.FILTERS) | short * int(Feature.LEAST_LENGTH) | changed * int(Feature.PENALTIES)
        self._features[admissions["slot"]] = sampling | logprobs | wants

    def of(self, slots: NDArray[np.int32]) -> Feature:
        """All that any of the slots asks for."""
        return Feature(int(np.bitwise_or.reduce(self._features[slots], initial=0)))

    def asking(self, slots: NDArray[np.int32], feature: Feature) -> NDArray[np.bool_]:
        """Which of the slots ask for it."""
        asking: NDArray[np.bool_] = (self._features[slots] & feature) != 0
        return asking


def variants(apart: bool) -> tuple[Feature, ...]:
    """VARIANTS, and where rows without filters are sampled for less, apart, one for these."""
    return (NO_FEATURES, Feature.SAMPLING, *VARIANTS[1:]) if apart else VARIANTS
