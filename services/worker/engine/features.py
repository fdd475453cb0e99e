"""What sampling the rows of a step ask for, as the host knows it from their admissions: it picks how much a step computes.

A row's token depends on what the row itself asks for: a step that can do more than a row needs gives it the same token.
"""

from enum import IntFlag

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


class SlotFeatures:
    """By slot, since its admission."""

    def __init__(self, slots: int) -> None:
        self._features = np.zeros(slots, dtype=np.int32)

    def admit(self, admissions: NDArray[np.void]) -> None:
        sampling = (admissions["temperature"] >= GREEDY_BELOW.value) * int(Feature.SAMPLING)
        filtered = (admissions["top_k"] > 0) | (admissions["top_p"] < 1) | (admissions["min_p"] > 0)
        filters = (filtered & (sampling != 0)) * int(Feature.FILTERS)
        least_length = (admissions["min_length"] > admissions["prompt_length"]) * int(Feature.LEAST_LENGTH)
        penalties = ((admissions["flags"] & (SlotFlag.PENALTIES | SlotFlag.BIASES)) != 0) * int(Feature.PENALTIES)
        logprobs = ((admissions["flags"] & SlotFlag.LOGPROBS) != 0) * int(Feature.LOGPROBS)
        self._features[admissions["slot"]] = sampling | filters | least_length | penalties | logprobs

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
