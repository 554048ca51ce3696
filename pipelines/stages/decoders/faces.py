"""Face detectors with five points: YuNet and SCRFD."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.config import PreprocessConfig
from pipelines.decode_config import Scrfd, Yunet
from pipelines.results import Detections
from pipelines.stages.decoders.candidates import (
    Outputs,
    best_of,
    cells_of,
    corners_of,
    detections_of,
    keypoints_of,
    output_of,
    whole_pixels,
)
from pipelines.stages.decoders.expected import Expected
from pipelines.stages.decoders.grid import cell_count
from pipelines.stages.view import View

POINTS = 5
SCRFD_ANCHORS = 2
YUNET_COLUMNS = {"cls": 1, "obj": 1, "bbox": 4, "kps": 2 * POINTS}


def yunet_outputs(config: Yunet, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the outputs of `yunet`, whose names are fixed."""
    return tuple(
        Expected(f"{name}_{stride}", f"{name}_{stride}", (1, _cells(stride, preprocess), columns))
        for name, columns in YUNET_COLUMNS.items()
        for stride in config.strides
    )


def scrfd_outputs(config: Scrfd, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the outputs of `scrfd`: for each key an output of each stride."""
    columns = {"scores": 1, "boxes": 4} | ({"keypoints": 2 * POINTS} if config.keypoints else {})
    names = {key: getattr(config, key) for key in columns}
    return tuple(
        Expected(
            f"{key}[{level}]",
            names[key][level] if level < len(names[key]) else "",
            (1, SCRFD_ANCHORS * _cells(stride, preprocess), columns[key]),
            leading_one=True,
        )
        for key in columns
        for level, stride in enumerate(config.strides)
    )


def decode_yunet(outputs: Outputs, config: Yunet, view: View) -> Detections:
    """Return faces."""
    cls, obj, boxes, points = (
        _joined(outputs, [f"{name}_{stride}" for stride in config.strides], columns)
        for name, columns in YUNET_COLUMNS.items()
    )
    scores = np.sqrt(np.clip(cls[:, 0], 0.0, 1.0) * np.clip(obj[:, 0], 0.0, 1.0))
    faces = best_of(scores, config.score_threshold)
    corners, strides = cells_of(config.strides, view.input_width, view.input_height, 0.0)
    corner, stride = corners[faces], strides[faces, None]
    with np.errstate(over="ignore"):  # infinite sides are cut at the frame
        sides = np.exp(boxes[faces, 2:]) * stride
    centres = corner + boxes[faces, :2] * stride
    corners = corners_of(np.concatenate([centres, sides], axis=1))
    # OpenCV's FaceDetectorYN compares x, y, width and height without their fractions.
    places = np.trunc(corners[:, :2])
    whole = np.concatenate([places, places + np.trunc(corners[:, 2:] - corners[:, :2])], axis=1)
    return _faces(
        corners,
        scores[faces],
        corner[:, None] + points[faces].reshape(-1, POINTS, 2) * stride[:, None],
        config,
        view,
        compared=whole,
    )


def decode_scrfd(outputs: Outputs, config: Scrfd, view: View) -> Detections:
    """Return faces."""
    scores = _joined(outputs, config.scores, 1)[:, 0]
    faces = best_of(scores, config.score_threshold)
    corners, strides = cells_of(
        config.strides, view.input_width, view.input_height, 0.0, SCRFD_ANCHORS
    )
    corner, stride = corners[faces], strides[faces, None]
    sides = _joined(outputs, config.boxes, 4)[faces] * stride
    boxes = np.concatenate([corner - sides[:, :2], corner + sides[:, 2:]], axis=1)
    points = None
    if config.keypoints:
        offsets = _joined(outputs, config.keypoints, 2 * POINTS)[faces].reshape(-1, POINTS, 2)
        points = corner[:, None] + offsets * stride[:, None]
    return _faces(boxes, scores[faces], points, config, view, compared=whole_pixels(boxes, view))


def _faces(
    boxes: NDArray[Any],
    scores: NDArray[Any],
    points: NDArray[Any] | None,
    config: Yunet | Scrfd,
    view: View,
    *,
    compared: NDArray[Any],
) -> Detections:
    """Return detections of class 0 with their points; suppression compares `compared`."""
    detections, rows = detections_of(
        boxes,
        scores,
        np.zeros(len(scores), np.int64),
        view,
        max_detections=config.max_detections,
        iou_threshold=config.iou_threshold,
        compared=compared,
    )
    if points is None:
        return detections
    return replace(detections, keypoints=keypoints_of(points[rows], None, view))


def _joined(outputs: Outputs, names: Sequence[str], columns: int) -> NDArray[Any]:
    """Return the rows of all levels, [A, columns]."""
    return np.concatenate([output_of(outputs, name).reshape(-1, columns) for name in names])


def _cells(stride: int, preprocess: PreprocessConfig) -> int:
    return cell_count((stride,), preprocess.width, preprocess.height)
