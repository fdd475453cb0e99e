"""Faults that a simulated group has on demand: at a certain iteration, or each with some probability."""

import random
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Kind = Literal["delay", "stall", "crash", "error"]


class Fault(BaseModel):
    """delay: the iteration takes `seconds` longer. stall: it never ends. crash: the rank ends. error: one of its rows fails."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    step: Annotated[int, Field(ge=1)] | None = Field(None, description="Number of the iteration, counted from 1 at the group's start.")
    probability: float = Field(0.0, ge=0, le=1, description="Of every iteration.")
    seconds: float = Field(0.1, ge=0, description="Of a delay.")
    group: str | None = Field(None, description="Only this one has it.")

    @model_validator(mode="after")
    def happens_once_or_by_chance(self) -> "Fault":
        if (self.step is None) == (self.probability == 0):
            raise ValueError("give either step or probability")
        return self


class Faults:
    """Those of one group. Deterministic: a group has the same faults in every run."""

    def __init__(self, faults: list[Fault], group: str) -> None:
        self._faults = [fault for fault in faults if fault.group in (None, group)]
        self._random = random.Random(group)
        self._step = 0

    def next(self) -> list[Fault]:
        """What befalls the iteration that begins now."""
        self._step += 1
        return [fault for fault in self._faults if fault.step == self._step or self._random.random() < fault.probability]

    def choose(self, rows: int) -> int:
        """Which of so many rows."""
        return self._random.randrange(rows)
