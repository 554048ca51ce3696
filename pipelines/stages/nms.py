"""Non-maximum suppression per class, of upright and of rotated boxes."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MAX_LISTED = 2000  # OpenCV's time grows with the square; above, whole rows of overlaps are faster


def suppress(
    boxes: NDArray[np.float32],
    scores: NDArray[np.float32],
    class_ids: NDArray[np.int64],
    iou_threshold: float,
    limit: int,
) -> NDArray[np.int64]:
    """Return the indices of the boxes that stay, best score first, at most `limit`.

    boxes: [N, 4] x1, y1, x2, y2. Of two boxes of one class that overlap by more than
    `iou_threshold`, the one with the lower score goes.
    """
    if len(boxes) == 0:
        return np.empty(0, np.int64)
    # Each class is moved to a place of its own, so one pass serves all classes. float64: the
    # offsets must not cost the coordinates their fractions.
    corners = boxes.astype(np.float64)
    span = corners.max() - corners.min() + 1.0
    corners += (class_ids * span)[:, None]
    if len(boxes) > MAX_LISTED:
        return _greedy(corners, scores, _overlaps, iou_threshold, limit)
    corners[:, 2:] -= corners[:, :2]
    from pipelines.vision import cv2

    # As lists: 4.7 times faster than arrays, whose rows are converted one by one.
    kept = cv2.dnn.NMSBoxes(corners.tolist(), scores.tolist(), 0.0, iou_threshold)
    return np.asarray(kept, np.int64).reshape(-1)[:limit]


def suppress_rotated(
    rotated: NDArray[np.float32],
    scores: NDArray[np.float32],
    class_ids: NDArray[np.int64],
    iou_threshold: float,
    limit: int,
) -> NDArray[np.int64]:
    """`suppress` for boxes [N, 5]: centre x, centre y, width, height, angle in radians.

    They overlap as normal distributions of their mean and covariance do: 1 - Hellinger distance
    (probabilistic IoU, arXiv 2106.06072).
    """
    if len(rotated) == 0:
        return np.empty(0, np.int64)
    x, y, width, height, angle = rotated.astype(np.float64).T
    along, across = width**2 / 12.0, height**2 / 12.0
    cos, sin = np.cos(angle), np.sin(angle)
    rows = np.stack(
        [
            x,
            y,
            along * cos**2 + across * sin**2,
            along * sin**2 + across * cos**2,
            (along - across) * cos * sin,
            class_ids,
        ],
        axis=1,
    )
    return _greedy(rows, scores, _gaussian_overlaps, iou_threshold, limit)


def _greedy(
    rows: Floats,
    scores: NDArray[np.float32],
    overlaps: Callable[[Floats, Floats], Floats],
    iou_threshold: float,
    limit: int,
) -> NDArray[np.int64]:
    """Keep the best row, drop what overlaps it, and so on; `overlaps` takes one row and many."""
    order: NDArray[Any] = np.argsort(-scores, kind="stable")
    kept: list[int] = []
    while len(order) and len(kept) < limit:
        best, order = order[0], order[1:]
        kept.append(int(best))
        order = order[overlaps(rows[best], rows[order]) <= iou_threshold]
    return np.array(kept, np.int64)


def _overlaps(box: Floats, boxes: Floats) -> Floats:
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    shared: Floats = np.clip(sides, 0.0, None).prod(axis=1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    union: Floats = area + (box[2:] - box[:2]).prod() - shared
    return shared / union


def _gaussian_overlaps(one: Floats, many: Floats) -> Floats:
    """Return 1 - Hellinger distance; rows: mean x and y, variances, covariance, class."""
    dx, dy = many[:, 0] - one[0], many[:, 1] - one[1]
    xx, yy, xy = many[:, 2] + one[2], many[:, 3] + one[3], many[:, 4] + one[4]
    determinant = xx * yy - xy**2
    own = np.maximum(one[2] * one[3] - one[4] ** 2, 0.0)
    others = np.maximum(many[:, 2] * many[:, 3] - many[:, 4] ** 2, 0.0)
    distance = (yy * dx**2 + xx * dy**2 - 2.0 * xy * dx * dy) / (4.0 * determinant)
    with np.errstate(divide="ignore"):  # a box without area is far from every other
        spread = 0.5 * np.log(determinant / (4.0 * np.sqrt(own * others)))
    coefficient = np.exp(-np.maximum(distance + spread, 0.0))
    overlap: Floats = 1.0 - np.sqrt(np.maximum(1.0 - coefficient, 0.0))
    return np.where(many[:, 5] == one[5], overlap, 0.0)
