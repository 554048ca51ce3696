"""Boxes [A, 4]: their form and their corners."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_IOU = 0.5
"""Boxes that overlap by this IoU are at one place."""


def have_corners(boxes: NDArray[Any]) -> bool:
    """True for left, top, right, bottom; False for centre, width, height, decided by values."""
    return bool(((boxes[:, 2] >= boxes[:, 0]) & (boxes[:, 3] >= boxes[:, 1])).all())


def as_corners(boxes: NDArray[Any], corners: bool) -> NDArray[np.float64]:
    """Return boxes as left, top, right, bottom; `corners`: they are that already."""
    array = np.asarray(boxes, np.float64)
    if corners:
        return array
    half = array[:, 2:] / 2.0
    return np.concatenate((array[:, :2] - half, array[:, :2] + half), axis=1)
