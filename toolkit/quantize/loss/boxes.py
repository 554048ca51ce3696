"""Boxes [A, 4]: their form, their corners and their overlap."""

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


def overlaps(box: NDArray[np.float64], boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Intersection over union of one box with each of `boxes`; 0 for empty ones."""
    low, high = np.maximum(box[:2], boxes[:, :2]), np.minimum(box[2:], boxes[:, 2:])
    common = np.prod(np.clip(high - low, 0.0, None), axis=1)
    area = float(np.prod(box[2:] - box[:2]))
    areas = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    union = area + areas - common
    iou: NDArray[np.float64] = np.divide(
        common, union, out=np.zeros_like(common), where=union > 0.0
    )
    return iou
