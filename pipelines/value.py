"""The base of every table in pipeline.toml and model.toml, and the numbers and names in them."""

from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0.0)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
Name = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{0,64}$")]  # of a source


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every table: frozen, and unknown keys are refused."""
