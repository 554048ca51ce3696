"""From scores of all cells to detections: what the families of decoders share.

choose the best cells (`choose_columns`, `choose_rows`), compute their boxes alone,
then `detections_of`: suppress, to the frame, cut there, drop what is empty
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.errors import PipelineError
from pipelines.decode_config import BoxesScores, ClassRows, Scored
from pipelines.results import Detections
from pipelines.stages.nms import suppress
from pipelines.stages.view import View

MAX_CANDIDATES = 30_000  # as Ultralytics (max_nms); suppression ends once it has enough boxes

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


def choose_columns(scores: Floats, threshold: float) -> Candidates:
    """Choose cells by their best class; scores [C, A], the layout of channels first."""
    best = scores.max(axis=0)
    cells = best_of(best, threshold)
    return Candidates(cells, best[cells], scores[:, cells].argmax(axis=0))


def choose_rows(scores: Floats, threshold: float) -> Candidates:
    """Choose cells by their best class; scores [A, C].

    One comparison of all scores finds the few rows that matter: a maximum along short rows takes
    several times as long.
    """
    # A NaN row is not chosen: its maximum is NaN.
    rows = np.unique(np.flatnonzero(scores.reshape(-1) >= threshold) // scores.shape[1])
    best = scores[rows].max(axis=1)
    chosen = best_of(best, threshold)
    rows = rows[chosen]
    return Candidates(rows, best[chosen], scores[rows].argmax(axis=1))


def best_of(scores: NDArray[Any], threshold: float) -> Indices:
    """Return the indices of the best scores [M] at or above the threshold, in no order.

    NaN and infinity are below every threshold.
    """
    chosen = np.flatnonzero((scores >= threshold) & (scores < np.inf))
    if len(chosen) > MAX_CANDIDATES:
        chosen = chosen[np.argpartition(scores[chosen], -MAX_CANDIDATES)[-MAX_CANDIDATES:]]
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


def clip_to_input(boxes: NDArray[Any], view: View) -> Floats:
    """Return boxes [N, 4] in input pixels, cut at the input's border."""
    size = np.array([view.input_width, view.input_height] * 2, np.float32)
    return np.asarray(np.clip(boxes, np.float32(0.0), size), np.float32)


def whole_pixels(boxes: NDArray[Any], view: View) -> Floats:
    """Return boxes [N, 4] of input pixels in frame pixels, wider and higher by one: suppression of
    SCRFD and RetinaFace counts the last pixel, too."""
    frame = view.geometry.to_frame(boxes)
    frame[:, 2:] += 1.0
    return frame


def detections_of(
    boxes: NDArray[Any],
    scores: NDArray[Any],
    class_ids: NDArray[Any],
    config: Scored,
    view: View,
    *,
    compared: NDArray[Any] | None = None,
) -> tuple[Detections, Indices]:
    """Return detections, best first, and the row of each.

    `boxes` [M, 4]: x1, y1, x2, y2 in input pixels. `compared` [M, 4]: what suppression compares, if
    not `boxes`.
    """
    rows = np.flatnonzero((boxes[:, 2:] > boxes[:, :2]).all(axis=1))  # False for NaN, too
    limit, max_iou = config.max_detections, config.max_iou
    if max_iou is None:
        rows = rows[np.argsort(-scores[rows], kind="stable")[:limit]]
    else:
        rivals = boxes if compared is None else compared
        rows = rows[suppress(rivals[rows], scores[rows], class_ids[rows], max_iou, limit)]
    clipped, shown = clip_to_frame(view.geometry.to_frame(boxes[rows]), view)
    rows = rows[shown]
    detections = Detections(
        clipped[shown],
        scores[rows].astype(np.float32, copy=False),
        class_ids[rows].astype(np.int64, copy=False),
    )
    return detections, rows


def formatted_detections(
    boxes: NDArray[Any], chosen: Candidates, config: BoxesScores | ClassRows, view: View
) -> Detections:
    """Return the detections of chosen boxes [M, 4], in the format and the unit of [decode]."""
    boxes = scale_to_pixels(boxes, config.unit, view)
    if config.format != "corners":
        boxes = corners_of(boxes)
    return detections_of(boxes, chosen.scores, chosen.class_ids, config, view)[0]


def keypoints_of(
    points: NDArray[Any], scores: NDArray[Any] | None, view: View, *, clip: bool = False
) -> Floats:
    """Return keypoints [N, K, 3] in frame pixels for points [N, K, 2] in input pixels.

    A point that is no number gets the score 0. Without scores [N, K] the others get 1. `clip`:
    points outside the frame move to its border.
    """
    frame = view.geometry.points_to_frame(points)
    finite = np.asarray(np.isfinite(frame).all(axis=-1))
    visible = np.ones(finite.shape, np.float32) if scores is None else scores
    visible = np.where(finite & np.isfinite(visible), visible, 0.0)
    frame = np.where(finite[..., None], frame, 0.0)
    if clip:
        frame = np.clip(frame, 0.0, [view.frame_width, view.frame_height])
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
