"""A finite number on the command line: click's FloatRange accepts "nan"."""

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """click.FloatRange without "inf" and "nan"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401  (click's)
        """Return the number; fails as click's types do."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number
