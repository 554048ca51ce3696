"""Face detectors with points: YuNet, SCRFD, RetinaFace and BlazeFace.

RetinaFace (Deng et al. 2019; exports of biubug6's Pytorch_Retinaface): offsets o from square priors
around the centre of each cell, with variances v.

    centre = prior + o v0 side      size = side exp(o v1)      point = prior + o v0 side

BlazeFace (Bazarevsky et al. 2019; MediaPipe's models): centre, sides and six points in pixels from
the centre of each cell; anchors of one size, several a cell.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from device.errors import PipelineError
from pipelines.config import PreprocessConfig
from pipelines.decode_config import Blazeface, RetinaFace, Scrfd, Yunet
from pipelines.results import Detections
from pipelines.stages.decoders.candidates import (
    Floats,
    Outputs,
    best_of,
    cells_of,
    corners_of,
    detections_of,
    keypoints_of,
    output_of,
    sigmoid,
    whole_pixels,
)
from pipelines.stages.decoders.expected import Expected
from pipelines.stages.decoders.grid import cell_count
from pipelines.stages.nms import merge_weighted
from pipelines.stages.view import View

POINTS = 5
BLAZEFACE_POINTS = 6
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
        boxes, scores, np.zeros(len(scores), np.int64), config, view, compared=compared
    )
    if points is None:
        return detections
    return replace(detections, keypoints=keypoints_of(points[rows], None, view))


def _joined(outputs: Outputs, names: Sequence[str], columns: int) -> NDArray[Any]:
    """Return the rows of all levels, [A, columns]."""
    return np.concatenate([output_of(outputs, name).reshape(-1, columns) for name in names])


def _cells(stride: int, preprocess: PreprocessConfig) -> int:
    return cell_count((stride,), preprocess.width, preprocess.height)


def retinaface_outputs(config: RetinaFace, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the outputs of `retinaface`."""
    strides, priors = len(config.strides), len(config.priors)
    if priors % strides:
        raise PipelineError(
            f"[decode] of kind retinaface has {priors} priors for {strides} strides: give equally"
            " many for each stride, in its order."
        )
    cells = cell_count(config.strides, preprocess.width, preprocess.height)
    count = cells * (priors // strides)
    outputs = [
        Expected("boxes", config.boxes, (1, count, 4)),
        Expected("scores", config.scores, (1, count, 2)),
    ]
    if config.keypoints:
        outputs.append(Expected("keypoints", config.keypoints, (1, count, 2 * POINTS)))
    return tuple(outputs)


def decode_retinaface(outputs: Outputs, config: RetinaFace, view: View) -> Detections:
    """Return faces."""
    scores = output_of(outputs, config.scores)[0, :, 1]
    faces = best_of(scores, config.score_threshold)
    centres, sides = _priors(config.strides, config.priors, view.input_width, view.input_height)
    centre, side = centres[faces], sides[faces, None]
    offsets = output_of(outputs, config.boxes)[0, faces]
    place, scale = config.variances
    with np.errstate(over="ignore"):  # infinite sides are cut at the frame
        sizes = side * np.exp(offsets[:, 2:] * scale)
    boxes = np.concatenate([centre + offsets[:, :2] * place * side, sizes], axis=1)
    corners = corners_of(boxes)
    detections, stay = detections_of(
        corners,
        scores[faces],
        np.zeros(len(faces), np.int64),
        config,
        view,
        compared=whole_pixels(corners, view),
    )
    if not config.keypoints:
        return detections
    points = output_of(outputs, config.keypoints)[0, faces[stay]].reshape(-1, POINTS, 2)
    places = centre[stay, None] + points * place * side[stay, None]
    return replace(detections, keypoints=keypoints_of(places, None, view))


@lru_cache(maxsize=8)
def _priors(
    strides: tuple[int, ...], priors: tuple[int, ...], width: int, height: int
) -> tuple[Floats, Floats]:
    """Return centres [A, 2] and sides [A] in pixels. Shared: do not write to them."""
    each = len(priors) // len(strides)
    centres, strides_of = cells_of(strides, width, height, 0.5, each)
    by_stride = {
        stride: priors[level * each : (level + 1) * each] for level, stride in enumerate(strides)
    }
    sides = np.concatenate(
        [
            np.tile(
                np.asarray(by_stride[stride], np.float32), int(np.sum(strides_of == stride)) // each
            )
            for stride in strides
        ]
    )
    return centres, sides


def blazeface_outputs(config: Blazeface, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the outputs of `blazeface`."""
    if len(config.anchors) != len(config.strides):
        raise PipelineError(
            f"[decode] of kind blazeface has {len(config.anchors)} numbers of anchors for"
            f" {len(config.strides)} strides: give one for each stride, in its order."
        )
    count = anchor_count(config.strides, config.anchors, preprocess.width, preprocess.height)
    return (
        Expected("boxes", config.boxes, (1, count, 4 + 2 * BLAZEFACE_POINTS)),
        Expected("scores", config.scores, (1, count, 1)),
    )


def anchor_count(
    strides: tuple[int, ...], anchors: tuple[int, ...], width: int, height: int
) -> int:
    """Return how many anchors an input of this size has."""
    return sum(
        number * cell_count((stride,), width, height)
        for stride, number in zip(strides, anchors, strict=True)
    )


def decode_blazeface(outputs: Outputs, config: Blazeface, view: View) -> Detections:
    """Return faces."""
    scores = sigmoid(output_of(outputs, config.scores)[0, :, 0])
    faces = best_of(scores, config.score_threshold)
    centres = np.concatenate(
        [
            cells_of((stride,), view.input_width, view.input_height, anchors=number)[0]
            for stride, number in zip(config.strides, config.anchors, strict=True)
        ]
    )
    rows = output_of(outputs, config.boxes)[0, faces]
    boxes = corners_of(np.concatenate([centres[faces] + rows[:, :2], rows[:, 2:4]], axis=1))
    points = centres[faces, None] + rows[:, 4:].reshape(-1, BLAZEFACE_POINTS, 2)
    places = np.concatenate([boxes, points.reshape(-1, 2 * BLAZEFACE_POINTS)], axis=1)
    solid = (boxes[:, 2:] > boxes[:, :2]).all(axis=1) & np.isfinite(places).all(axis=1)
    places, best = merge_weighted(
        places[solid], scores[faces[solid]], config.iou_threshold, config.max_detections
    )
    detections, stay = detections_of(
        places[:, :4], best, np.zeros(len(best), np.int64), config, view
    )
    points = places[stay, 4:].reshape(-1, BLAZEFACE_POINTS, 2)
    return replace(detections, keypoints=keypoints_of(points, None, view))
