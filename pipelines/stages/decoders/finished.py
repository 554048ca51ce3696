"""Boxes, scores and classes after suppression, in outputs of their own.

EfficientNMS, YOLO-NAS, RT-DETR and D-FINE, torchvision's detectors, TensorFlow's Object Detection
API, TAO EfficientDet; mmdeploy keeps the scores in the boxes' rows.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.config import PreprocessConfig
from pipelines.decode_config import BoxScoreRows, Finished
from pipelines.results import Detections
from pipelines.stages.decoders.candidates import (
    Indices,
    Outputs,
    best_of,
    detections_of,
    keypoints_of,
    output_of,
    scale_to_pixels,
)
from pipelines.stages.decoders.expected import (
    INTEGERS,
    MAP_HEIGHT,
    MAP_WIDTH,
    NUMBERS,
    Expected,
)
from pipelines.stages.decoders.masks import with_masks
from pipelines.stages.view import View


def finished_outputs(config: Finished, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the outputs of `finished`."""
    outputs = [
        Expected("boxes", config.boxes, (1, "rows", 4), leading_one=True),
        Expected("scores", config.scores, (1, "rows"), leading_one=True),
        Expected("classes", config.classes, (1, "rows"), NUMBERS, leading_one=True),
    ]
    if config.count:
        outputs.append(Expected("count", config.count, (1,), NUMBERS, more_ones=True))
    if config.masks:
        axes = ("rows", 1, MAP_HEIGHT, MAP_WIDTH)
        outputs.append(Expected("masks", config.masks, axes))
    if config.keypoints:
        outputs.append(Expected("keypoints", config.keypoints, ("rows", "keypoints", 3)))
    return tuple(outputs)


def box_score_rows_outputs(
    config: BoxScoreRows, preprocess: PreprocessConfig
) -> tuple[Expected, ...]:
    """Return the outputs of `box_score_rows`."""
    return (
        Expected("boxes", config.boxes, (1, "rows", 5), leading_one=True),
        Expected("classes", config.classes, (1, "rows"), INTEGERS, leading_one=True),
    )


def decode_finished(outputs: Outputs, config: Finished, view: View) -> Detections:
    """Return the rows that are valid and above the threshold."""
    boxes = output_of(outputs, config.boxes).reshape(-1, 4)
    scores = output_of(outputs, config.scores).reshape(-1)
    classes = output_of(outputs, config.classes).reshape(-1)
    if config.count:
        count = _count(output_of(outputs, config.count), len(scores))
        boxes, scores, classes = boxes[:count], scores[:count], classes[:count]
    if config.format == "corners_y_first":
        boxes = boxes[:, [1, 0, 3, 2]]
    boxes = scale_to_pixels(boxes, config.unit, view)
    rows = _known(classes, config.first_class)
    rows = rows[best_of(scores[rows], config.score_threshold)]
    detections, stay = detections_of(
        boxes[rows], scores[rows], classes[rows].astype(np.int64) - config.first_class, config, view
    )
    rows = rows[stay]
    if config.masks:
        masks = output_of(outputs, config.masks)[rows, 0]
        height, width = masks.shape[1:]
        detections = with_masks(
            detections,
            boxes[rows],
            lambda index, lines, columns: masks[index, lines, columns] - np.float32(0.5),
            (height, width),
            view,
        )
    if config.keypoints:
        points = output_of(outputs, config.keypoints)[rows]
        keypoints = keypoints_of(points[..., :2], points[..., 2], view)
        detections = replace(detections, keypoints=keypoints)
    return detections


def decode_box_score_rows(outputs: Outputs, config: BoxScoreRows, view: View) -> Detections:
    """Return the rows above the threshold."""
    boxes = output_of(outputs, config.boxes).reshape(-1, 5)
    classes = output_of(outputs, config.classes).reshape(-1)
    rows = _known(classes, 0)
    rows = rows[best_of(boxes[rows, 4], config.score_threshold)]
    return detections_of(
        boxes[rows, :4], boxes[rows, 4], classes[rows].astype(np.int64), config, view
    )[0]


def _known(classes: NDArray[Any], first_class: int) -> Indices:
    """Return the rows whose class is a number from the first on."""
    return np.flatnonzero((classes >= first_class) & (classes < np.inf))


def _count(values: NDArray[Any], rows: int) -> int:
    """Return the number of valid rows; a count that is no number is none."""
    count = float(values.reshape(-1)[0])
    return int(min(max(count, 0.0), rows)) if np.isfinite(count) else 0
