"""Mean average precision at IoU 0.5: how good detections are against the truth."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.results import Detections

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """The objects that an image really shows: `boxes` [N, 4] x1, y1, x2, y2; `class_ids` [N]."""

    boxes: NDArray[np.float32]
    class_ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """`map50` is the mean of `by_class`, which holds the classes that the truth shows."""

    map50: float
    by_class: dict[int, float]


def mean_average_precision(
    predictions: Sequence[Detections], truths: Sequence[Truth], iou_threshold: float = 0.5
) -> Accuracy:
    """Compare detections with the truth, image by image.

    Average precision by all-point interpolation (Pascal VOC 2010 on). A detection counts if it
    overlaps a truth box of its class, that no better detection has taken, by the threshold.
    """
    if len(predictions) != len(truths):
        raise ValueError(f"{len(predictions)} predictions for {len(truths)} images")
    classes = sorted({int(c) for truth in truths for c in truth.class_ids})
    by_class = {c: _average_precision(predictions, truths, c, iou_threshold) for c in classes}
    return Accuracy(float(np.mean(list(by_class.values()))) if by_class else 0.0, by_class)


def iou_matrix(first: NDArray[Any], second: NDArray[Any]) -> Floats:
    """Return intersection over union of boxes [N, 4] and [M, 4] as [N, M]; 0 for empty ones."""
    a, b = first.astype(np.float64)[:, None], second.astype(np.float64)[None]
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    shared = np.clip(sides, 0.0, None).prod(axis=-1)
    areas = (a[..., 2:] - a[..., :2]).prod(axis=-1) + (b[..., 2:] - b[..., :2]).prod(axis=-1)
    union = areas - shared
    overlap: Floats = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0.0)
    return overlap


def _average_precision(
    predictions: Sequence[Detections], truths: Sequence[Truth], class_id: int, threshold: float
) -> float:
    scores: list[float] = []
    hits: list[bool] = []
    positives = 0
    for predicted, truth in zip(predictions, truths, strict=True):
        of_class = predicted.class_ids == class_id
        true_boxes = truth.boxes[truth.class_ids == class_id]
        order = np.argsort(-predicted.scores[of_class], kind="stable")
        scores += predicted.scores[of_class][order].tolist()
        hits += _match(iou_matrix(predicted.boxes[of_class][order], true_boxes), threshold)
        positives += len(true_boxes)
    ranking = np.argsort(-np.asarray(scores), kind="stable")
    true_positives = np.cumsum(np.asarray(hits, np.float64)[ranking])
    precision = true_positives / np.arange(1, len(true_positives) + 1)
    envelope = np.maximum.accumulate(precision[::-1])[::-1]
    steps = np.diff(true_positives / positives, prepend=0.0)
    return float((steps * envelope).sum())


def _match(overlaps: Floats, threshold: float) -> list[bool]:
    """Say for each detection (best first) whether it takes a truth box of its own.

    As in Pascal VOC, only the truth box that it overlaps most is tried.
    """
    taken: set[int] = set()
    hits: list[bool] = []
    for row in overlaps:
        best = int(row.argmax()) if len(row) else -1
        hit = best >= 0 and bool(row[best] >= threshold) and best not in taken
        taken.update([best] if hit else [])
        hits.append(hit)
    return hits
