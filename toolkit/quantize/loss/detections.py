"""Detections: outputs with as many rows as the data decide, such as those of NMS in a model.

Rows of two runs have no order in common, and often another number. So they are compared by place
and class: a row of one run is that of another if they are of one class and their boxes overlap by
an IoU of 0.5.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.stages.accuracy import iou_matrix

DETECTIONS = np.dtype([("box", np.float64, (4,)), ("score", np.float64), ("label", np.int64)])
"""The rows of a part that holds detections."""
MIN_IOU = 0.5
"""Boxes that overlap by this IoU are at one place."""
MAX_ROWS = 300  # of a sample that are compared, the best first

Pair = tuple[NDArray[np.float64], NDArray[np.float64]]


def detections(
    boxes: NDArray[Any], scores: NDArray[Any], labels: NDArray[Any] | None
) -> NDArray[Any]:
    """Return [N] rows of DETECTIONS, of boxes [..., 4], scores [...] and labels [...].

    Without labels all are of one class. Empty where the three are not of one length.
    """
    corners, values = np.reshape(boxes, (-1, 4)), np.reshape(scores, -1)
    classes = np.zeros(len(values)) if labels is None else np.reshape(labels, -1)
    if not len(corners) == len(values) == len(classes):
        return np.zeros(0, DETECTIONS)
    rows = np.zeros(len(values), DETECTIONS)
    rows["box"], rows["score"], rows["label"] = corners, values, classes
    return rows


def by_class(rows: NDArray[Any], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return scores [N, C] of detections, each in the column of its class; `labels`: [C]."""
    return np.where(rows["label"][:, None] == labels, rows["score"][:, None], 0.0)


def comparable(reference: NDArray[Any], candidate: NDArray[Any]) -> Pair:
    """Return the elements of a part in two runs as vectors of one length.

    Of detections the scores, where one that the other run does not have has a score of 0. Arrays of
    other shapes have no element in common: where one has values the other has zeros.
    """
    if reference.dtype == DETECTIONS:
        return _scores(_best(reference), _best(candidate))
    exact = np.asarray(reference, np.float64).reshape(-1)
    actual = np.asarray(candidate, np.float64).reshape(-1)
    if np.shape(reference) == np.shape(candidate) or exact.size == actual.size:
        return exact, actual
    return (
        np.concatenate((exact, np.zeros(actual.size))),
        np.concatenate((np.zeros(exact.size), actual)),
    )


def _best(rows: NDArray[Any]) -> NDArray[Any]:
    """The rows of the largest scores in their order."""
    best: NDArray[Any] = rows[np.argsort(-rows["score"], kind="stable")[:MAX_ROWS]]
    return best


def _scores(reference: NDArray[Any], candidate: NDArray[Any]) -> Pair:
    """The scores of the rows of both, each row of one run with at most one of the other."""
    corners = have_corners(reference["box"])
    exact_boxes = as_corners(reference["box"], corners)
    boxes = as_corners(candidate["box"], corners)
    actual, free = np.zeros(len(reference)), np.ones(len(candidate), np.bool_)
    for at, row in enumerate(reference):
        same = free & (candidate["label"] == row["label"])
        shares = np.where(same, iou_matrix(exact_boxes[at][None], boxes)[0], 0.0)
        if shares.max(initial=0.0) >= MIN_IOU:
            match = int(shares.argmax())
            actual[at], free[match] = candidate["score"][match], False
    rest = candidate["score"][free]
    return (
        np.concatenate((reference["score"], np.zeros(len(rest)))),
        np.concatenate((actual, rest)),
    )


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
