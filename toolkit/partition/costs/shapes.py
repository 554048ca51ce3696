"""Shapes as numbers."""

import math
from collections.abc import Sequence

from device.engine.manifest import Dim


def known(shape: tuple[Dim, ...] | None) -> tuple[int, ...] | None:
    """Return a shape with a dynamic leading dimension as 1, None if another is unknown."""
    if shape is None:
        return None
    sizes = [1 if i == 0 and not isinstance(dim, int) else dim for i, dim in enumerate(shape)]
    static = tuple(dim for dim in sizes if isinstance(dim, int))
    return static if len(static) == len(sizes) else None


def product(dims: Sequence[int]) -> int:
    """Return the number of elements."""
    return math.prod(dims)
