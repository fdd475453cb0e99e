"""What sampling the rows of a step ask for, as the host knows it from their admissions: it picks how much a step computes.

A row's token depends on what the row itself asks for: a step that can do more than a row needs gives it the same token.
"""

from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from kernels.sampling import GREEDY_BELOW
from shared.protocol.plan import SlotFlag


class Feature(IntFlag):
    SAMPLING = 1  # a temperature
    LEAST_LENGTH = 2  # ids that are forbidden while the row is short
    PENALTIES = 4  # or biases
    LOGPROBS = 8  # of the row's tokens


NO_FEATURES = Feature(0)
# What captured steps can do: the first that covers a step's features is replayed.
VARIANTS = (
    NO_FEATURES,
    Feature.SAMPLING,
    Feature.SAMPLING | Feature.LEAST_LENGTH,
    Feature.SAMPLING | Feature.LEAST_LENGTH | Feature.PENALTIES,
    Feature.SAMPLING | Feature.LEAST_LENGTH | Feature.PENALTIES | Feature.LOGPROBS,
)


class SlotFeatures:
    """By slot, since its admission."""

    def __init__(self, slots: int) -> None:
        self._features = np.zeros(slots, dtype=np.int32)

    def admit(self, admissions: NDArray[np.void]) -> None:
        sampling = (admissions["temperature"] >= GREEDY_BELOW.value) * int(Feature.SAMPLING)
        least_length = (admissions["min_length"] > admissions["prompt_length"]) * int(Feature.LEAST_LENGTH)
        penalties = ((admissions["flags"] & (SlotFlag.PENALTIES | SlotFlag.BIASES)) != 0) * int(Feature.PENALTIES)
        logprobs = ((admissions["flags"] & SlotFlag.LOGPROBS) != 0) * int(Feature.LOGPROBS)
        self._features[admissions["slot"]] = sampling | least_length | penalties | logprobs

    def of(self, slots: NDArray[np.int32]) -> Feature:
        """All that any of the slots asks for."""
        return Feature(int(np.bitwise_or.reduce(self._features[slots], initial=0)))

    def asking(self, slots: NDArray[np.int32], feature: Feature) -> NDArray[np.bool_]:
        """Which of the slots ask for it."""
        asking: NDArray[np.bool_] = (self._features[slots] & feature) != 0
        return asking


def variant(features: Feature) -> Feature:
    return next(each for each in VARIANTS if features in each)
