"""Rotary position embedding as a config.json describes it. No torch here: `layers.rotary` makes the table.

Two layouts are read: `rope_theta` beside `rope_scaling` (whose kind is called `type` or `rope_type`), and transformers 5's
`rope_parameters`, which holds both.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, TypeAdapter, model_validator

MOST_POSITIONS = 2**31 - 1  # they are int32 on the device
Factor = Annotated[float, Field(ge=1, le=MOST_POSITIONS)]


class Rope(BaseModel):
    """What every kind has. A key that its kind does not know is an error: it would change what is computed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    rope_theta: float = Field(gt=1)
    partial_rotary_factor: float = Field(1.0, ge=1, le=1)  # part of a head's dimensions that rotate: all of them, in these families
    max_position_embeddings: PositiveInt  # the model's own, also where the file repeats another one here

    @property
    def max_length(self) -> int:
        """Positions that a request may use."""
        return self.max_position_embeddings

    @model_validator(mode="after")
    def positions_are_numbered(self) -> Self:
        if self.max_length > MOST_POSITIONS:
            raise ValueError(f"rope: a context of {self.max_length} positions, at most {MOST_POSITIONS} can be numbered")
        return self


class DefaultRope(Rope):
    rope_type: Literal["default"]


class LinearRope(Rope):
    """Positions divided by `factor`."""

    rope_type: Literal["linear"]
    factor: Factor

    @property
    def max_length(self) -> int:
        return int(self.max_position_embeddings * self.factor)


class DynamicRope(Rope):
    """NTK: theta grows with the context, here with the longest that is admitted."""

    rope_type: Literal["dynamic"]
    factor: Factor

    @property
    def max_length(self) -> int:
        return int(self.max_position_embeddings * self.factor)


class Llama3Rope(Rope):
    """Low frequencies divided by `factor`, high ones kept, those between interpolated."""

    rope_type: Literal["llama3"]
    factor: Factor
    low_freq_factor: float = Field(gt=0)
    high_freq_factor: float = Field(gt=0)
    original_max_position_embeddings: PositiveInt


class YarnRope(Rope):
    """Frequencies between `beta_slow` and `beta_fast` rotations interpolated; cosines and sines times an attention factor."""

    rope_type: Literal["yarn"]
    factor: Factor
    original_max_position_embeddings: PositiveInt
    attention_factor: float | None = Field(None, gt=0)
    beta_fast: float = Field(32.0, gt=0)
    beta_slow: float = Field(1.0, gt=0)
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    finetuned: bool | None = None  # whether the model was trained so: of no effect
    llama_4_scaling_beta: float | None = None  # Ministral's: queries grow with the logarithm of their position

    @property
    def max_length(self) -> int:
        return max(self.max_position_embeddings, int(self.original_max_position_embeddings * self.factor))


AnyRope = DefaultRope | LinearRope | DynamicRope | Llama3Rope | YarnRope
_ADAPTER: TypeAdapter[AnyRope] = TypeAdapter(Annotated[AnyRope, Field(discriminator="rope_type")])


def read_rope(
    parameters: dict[str, Any] | None,
    scaling: dict[str, Any] | None,
    theta: float,
    max_positions: int,
    original_positions: int | None = None,
) -> AnyRope:
    """From the raw `rope_parameters`, `rope_scaling` (which wins), and what stands beside them: `rope_theta` (theirs wins),
    `max_position_embeddings` and `original_max_position_embeddings` (which win). Raises pydantic's ValidationError."""
    values = {key: value for key, value in (scaling or parameters or {}).items() if value is not None}
    kind = values.pop("type", "default")
    values.setdefault("rope_type", kind)
    values.setdefault("rope_theta", theta)
    values["max_position_embeddings"] = max_positions
    if values["rope_type"] in ("llama3", "yarn"):
        if original_positions is not None:
            values["original_max_position_embeddings"] = original_positions
        values.setdefault("original_max_position_embeddings", max_positions)
    if values["rope_type"] == "yarn":
        values.setdefault("factor", max_positions / values["original_max_position_embeddings"])
    return _ADAPTER.validate_python(values)
