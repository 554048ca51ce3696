"""From scores of all cells to detections: what the families of decoders share.

choose the best cells (`choose_columns`, `choose_rows`), compute their boxes alone,
then `detections_of`: to the frame, clip, drop what is empty, suppress
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.errors import PipelineError
from pipelines.results import Detections
from pipelines.stages.nms import suppress
from pipelines.stages.view import View

MIN_CANDIDATES = 512  # suppression costs 0.1 ms at that number
CANDIDATES_A_DETECTION = 4

Outputs = Mapping[str, NDArray[Any]]
Floats = NDArray[np.float32]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Cells that may be objects: `cells`, `scores` and `class_ids`, each [M]."""

    cells: Indices
    scores: Floats
    class_ids: Indices


def output_of(outputs: Outputs, name: str) -> NDArray[Any]:
    """Return an output; floats of 16 bits become 32. Raises PipelineError if there is none."""
    if name not in outputs:
        raise PipelineError(
            f"the engine has no output {name!r} (it has {', '.join(outputs)}): correct the name in"
            " [decode] of pipeline.toml."
        )
    values = outputs[name]
    return values.astype(np.float32) if values.dtype == np.float16 else values


def candidate_limit(max_detections: int) -> int:
    """Return how many of the best cells go on."""
    return max(MIN_CANDIDATES, CANDIDATES_A_DETECTION * max_detections)


def choose_columns(scores: Floats, threshold: float, max_detections: int) -> Candidates:
    """Choose cells by their best class; scores [C, A], the layout of channels first."""
    best = scores.max(axis=0)
    cells = best_of(best, threshold, max_detections)
    return Candidates(cells, best[cells], scores[:, cells].argmax(axis=0))


def choose_rows(scores: Floats, threshold: float, max_detections: int) -> Candidates:
    """Choose cells by their best class; scores [A, C].

    One comparison of all scores finds the few rows that matter: a maximum along short rows takes
    several times as long.
    """
    # A NaN row is not kept: its maximum is NaN.
    rows = np.unique(np.flatnonzero(scores.reshape(-1) >= threshold) // scores.shape[1])
    best = scores[rows].max(axis=1)
    chosen = best_of(best, threshold, max_detections)
    rows = rows[chosen]
    return Candidates(rows, best[chosen], scores[rows].argmax(axis=1))


def best_of(scores: NDArray[Any], threshold: float, max_detections: int) -> Indices:
    """Return the indices of the best scores [M] at or above the threshold, in no order.

    NaN and infinity are below every threshold.
    """
    chosen = np.flatnonzero((scores >= threshold) & (scores < np.inf))
    limit = candidate_limit(max_detections)
    if len(chosen) > limit:
        chosen = chosen[np.argpartition(scores[chosen], -limit)[-limit:]]
    return chosen


def corners_of(centres: NDArray[Any]) -> Floats:
    """Return x1, y1, x2, y2 for boxes [N, 4] of centre x, centre y, width, height."""
    half = centres[:, 2:4] * 0.5
    corners = np.concatenate([centres[:, :2] - half, centres[:, :2] + half], axis=1)
    return corners.astype(np.float32, copy=False)


def clip_to_frame(boxes: Floats, view: View) -> tuple[Floats, NDArray[np.bool_]]:
    """Return boxes [N, 4] cut at the frame's border, and which of them have an area then."""
    size = np.array([view.frame_width, view.frame_height] * 2, np.float32)
    clipped = np.clip(boxes, np.float32(0.0), size)
    # False for NaN, too.
    return clipped, np.asarray((clipped[:, 2:] > clipped[:, :2]).all(axis=1))


def detections_of(
    boxes: NDArray[Any],
    scores: NDArray[Any],
    class_ids: NDArray[Any],
    view: View,
    *,
    max_detections: int,
    iou_threshold: float | None = None,
) -> tuple[Detections, Indices]:
    """Return detections, best first, and the row of each.

    `boxes` [M, 4]: x1, y1, x2, y2 in input pixels. `iou_threshold` None: nothing is suppressed.
    """
    clipped, solid = clip_to_frame(view.geometry.to_frame(boxes), view)
    rows = np.flatnonzero(solid)
    clipped, best, classes = clipped[rows], scores[rows], class_ids[rows]
    if iou_threshold is None:
        kept = np.argsort(-best, kind="stable")[:max_detections]
    else:
        kept = suppress(clipped, best, classes, iou_threshold, max_detections)
    detections = Detections(
        clipped[kept],
        best[kept].astype(np.float32, copy=False),
        classes[kept].astype(np.int64, copy=False),
    )
    return detections, rows[kept]


def keypoints_of(points: NDArray[Any], scores: NDArray[Any] | None, view: View) -> Floats:
    """Return keypoints [N, K, 3] in frame pixels for points [N, K, 2] in input pixels.

    A point that is no number gets the score 0. Without scores [N, K] the others get 1.
    """
    frame = view.geometry.points_to_frame(points)
    finite = np.asarray(np.isfinite(frame).all(axis=-1))
    visible = np.ones(finite.shape, np.float32) if scores is None else scores
    visible = np.where(finite & np.isfinite(visible), visible, 0.0)
    frame = np.where(finite[..., None], frame, 0.0)
    return np.concatenate([frame, visible[..., None]], axis=-1).astype(np.float32)


def sigmoid(logits: NDArray[Any]) -> Floats:
    """Return 1 / (1 + exp(-x)), float32, without overflow."""
    return (0.5 * (1.0 + np.tanh(0.5 * logits))).astype(np.float32)


def scale_to_pixels(boxes: NDArray[Any], unit: str, view: View) -> NDArray[Any]:
    """Return boxes [N, 4], x and y in turn, in input pixels; `unit`: "pixels" or "fraction"."""
    if unit == "pixels":
        return boxes
    return boxes * np.array([view.input_width, view.input_height] * 2, np.float32)


@lru_cache(maxsize=32)
def cells_of(
    strides: tuple[int, ...], width: int, height: int, offset: float = 0.5, anchors: int = 1
) -> tuple[Floats, Floats]:
    """Return the points [A, 2] in input pixels and strides [A] of all cells, level by level, row by
    row, `anchors` times each; the point is at `offset` of the cell. Shared: do not write to them.
    """
    points, sizes = [], []
    for stride in strides:
        rows, columns = np.mgrid[0 : -(-height // stride), 0 : -(-width // stride)]
        level = (np.stack([columns, rows], axis=-1).reshape(-1, 2) + offset) * stride
        level = np.repeat(level, anchors, axis=0)
        points.append(level.astype(np.float32))
        sizes.append(np.full(len(level), stride, np.float32))
    return np.concatenate(points), np.concatenate(sizes)
