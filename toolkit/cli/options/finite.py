"""A number on the command line that is one: click's range lets "nan" through."""

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """As click.FloatRange, and neither infinite nor "nan"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401  (click's)
        """Return the number; fails as click's types do."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return found
