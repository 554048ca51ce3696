"""Non-maximum suppression per class, of upright and of rotated boxes.

Boxes are compared as the network gives them, before they are cut at the frame: so do the reference
implementations of the families (docs/decoders.md).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CHUNK = 512  # boxes that are compared at once: 0.1 ms
ROTATED_CHUNK = 128
MAX_ROTATED = 2048  # each is compared with all better ones: 60 ms for so many
FAR = 1e6  # pixels; sides that overflow must not cost the other boxes their fractions


def suppress(
    boxes: NDArray[np.float32],
    scores: NDArray[np.float32],
    class_ids: NDArray[np.int64],
    iou_threshold: float,
    limit: int,
) -> NDArray[np.int64]:
    """Return the indices of the boxes that stay, best score first, at most `limit`.

    boxes: [N, 4] x1, y1, x2, y2. Of two boxes of one class that overlap by more than
    `iou_threshold`, the one with the lower score goes (as `torchvision.ops.nms`).
    """
    if len(boxes) == 0:
        return np.empty(0, np.int64)
    from pipelines.vision import cv2

    order = np.argsort(-scores, kind="stable")
    # Each class is moved to a place of its own, so one pass serves all classes. float64: the
    # offsets must not cost the coordinates their fractions.
    corners = np.clip(boxes[order].astype(np.float64), -FAR, FAR)
    span = corners.max() - corners.min() + 1.0
    corners += (class_ids[order] * span)[:, None]
    corners[:, 2:] -= corners[:, :2]
    # As lists: 4.7 times faster than arrays, whose rows are converted one by one.
    rectangles = corners.tolist()
    best: list[int] = []
    for start in range(0, len(rectangles), CHUNK):
        rivals = [*best, *range(start, min(start + CHUNK, len(rectangles)))]
        ranks = np.arange(len(rivals), 0, -1, dtype=np.float32).tolist()
        winners = cv2.dnn.NMSBoxes([rectangles[row] for row in rivals], ranks, 0.0, iou_threshold)
        best = [rivals[place] for place in np.asarray(winners).reshape(-1).tolist()]
        if len(best) >= limit:
            break
    return order[best[:limit]]


def suppress_rotated(
    rotated: NDArray[np.float32],
    scores: NDArray[np.float32],
    class_ids: NDArray[np.int64],
    iou_threshold: float,
    limit: int,
) -> NDArray[np.int64]:
    """Return the indices of the rotated boxes that stay, best score first, at most `limit`.

    rotated: [N, 5] centre x, centre y, width, height, angle in radians. Two boxes overlap as normal
    distributions of their mean and covariance do: 1 - Hellinger distance (probabilistic IoU, arXiv
    2106.06072). A box goes if any better one of its class overlaps it by `iou_threshold` or more,
    even one that goes itself: Fast NMS (arXiv 1904.02689), as Ultralytics suppresses.
    """
    order = np.argsort(-scores, kind="stable")[:MAX_ROTATED]
    x, y, width, height, angle = rotated[order].astype(np.float64).T
    along, across = width**2 / 12.0, height**2 / 12.0
    cos, sin = np.cos(angle), np.sin(angle)
    rows = np.stack(
        [
            x,
            y,
            along * cos**2 + across * sin**2,
            along * sin**2 + across * cos**2,
            (along - across) * cos * sin,
            class_ids[order],
        ]
    )
    stay: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    count = 0
    for start in range(0, len(order), ROTATED_CHUNK):
        chunk = np.arange(start, min(start + ROTATED_CHUNK, len(order)))
        better = np.arange(chunk[-1])
        overlaps = _gaussian_overlaps(rows[:, better, None], rows[:, None, chunk])
        loses = (overlaps >= iou_threshold) & (better[:, None] < chunk)
        stay.append(chunk[~loses.any(axis=0)])
        count += len(stay[-1])
        if count >= limit:
            break
    return order[np.concatenate(stay)[:limit]]


def _gaussian_overlaps(a: Floats, b: Floats) -> Floats:
    """Return 1 - Hellinger distance; [6, ...]: mean x and y, variances, covariance, class."""
    dx, dy = b[0] - a[0], b[1] - a[1]
    xx, yy, xy = b[2] + a[2], b[3] + a[3], b[4] + a[4]
    determinant = xx * yy - xy**2
    a_area = np.maximum(a[2] * a[3] - a[4] ** 2, 0.0)
    b_area = np.maximum(b[2] * b[3] - b[4] ** 2, 0.0)
    distance = (yy * dx**2 + xx * dy**2 - 2.0 * xy * dx * dy) / (4.0 * determinant)
    with np.errstate(divide="ignore"):  # a box without area is far from every other
        spread = 0.5 * np.log(determinant / (4.0 * np.sqrt(a_area * b_area)))
    coefficient = np.exp(-np.maximum(distance + spread, 0.0))
    overlap: Floats = 1.0 - np.sqrt(np.maximum(1.0 - coefficient, 0.0))
    return np.where(a[5] == b[5], overlap, 0.0)


def merge_weighted(
    places: NDArray[np.float32], scores: NDArray[np.float32], iou_threshold: float, limit: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return mean places of boxes that overlap, best score first, and the best score of each.

    places: [N, 4+M] x1, y1, x2, y2 and other coordinates. The best box and those that overlap it by
    more than `iou_threshold` become one, the mean weighted by their scores; then the best of the
    rest (weighted suppression of BlazeFace, arXiv 1907.05047).
    """
    order = np.argsort(-scores, kind="stable")
    merged: list[NDArray[Any]] = []
    best: list[float] = []
    while len(order) and len(merged) < limit:
        overlaps = _overlaps(places[order[0], :4], places[order, :4])
        near = overlaps > iou_threshold
        near[0] = True
        merged.append(np.average(places[order[near]], axis=0, weights=scores[order[near]]))
        best.append(scores[order[0]])
        order = order[~near]
    return (
        np.array(merged, np.float32).reshape(-1, places.shape[1]),
        np.array(best, np.float32),
    )


def _overlaps(box: NDArray[np.float32], boxes: NDArray[np.float32]) -> NDArray[np.float32]:
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    shared: NDArray[np.float32] = np.clip(sides, 0.0, None).prod(axis=1)
    area = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    union: NDArray[np.float32] = area + (box[2:] - box[:2]).prod() - shared
    return shared / union
