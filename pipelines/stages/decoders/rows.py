"""Finished rows: each row is an object with its best class, its columns named in [decode].

NMS-free YOLO (v10, 26), exports with NMS inside, YOLOv7 with NMS, RT-DETR of Ultralytics,
DeepStream-Yolo's exporters, YOLO-NAS flat, PP-YOLOE.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.config import PreprocessConfig
from pipelines.decode_config import ClassRows, Rows
from pipelines.results import Detections
from pipelines.stages.decoders.candidates import (
    Indices,
    Outputs,
    best_of,
    choose_rows,
    clip_to_input,
    corners_of,
    detections_of,
    formatted_detections,
    keypoints_of,
    output_of,
    scale_to_pixels,
)
from pipelines.stages.decoders.expected import CLASSES, COEFFICIENTS, Expected, Size
from pipelines.stages.decoders.masks import prototypes_output, with_prototype_masks
from pipelines.stages.decoders.rotated import rotated_detections
from pipelines.stages.view import View

CENTRE = ("cx", "cy", "w", "h")
CORNERS = ("x1", "y1", "x2", "y2")


def rows_outputs(config: Rows, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the outputs of `rows`."""
    columns = len(config.columns) + config.keypoints * config.keypoint_values
    width = Size((COEFFICIENTS,) if config.masks else (), plus=columns)
    rows = Expected("output", config.output, (1, "rows", width), leading_one=True)
    if not config.masks:
        return (rows,)
    masks = prototypes_output(config.masks)
    return (masks, rows)


def decode_rows(outputs: Outputs, config: Rows, view: View) -> Detections:
    """Return the rows that are above the threshold."""
    output = output_of(outputs, config.output)
    rows = output.reshape(-1, output.shape[-1])
    columns = {name: place for place, name in enumerate(config.columns)}
    rows = rows[best_of(rows[:, columns["score"]], config.score_threshold)]
    classes = rows[:, columns["class"]]
    rows = rows[np.isfinite(classes) & (classes >= 0.0)]  # -1 marks an unused row
    boxes = _boxes(rows, columns, config, view)
    if config.suppress and "angle" not in columns:  # as DeepStream-Yolo's parsers
        boxes = clip_to_input(boxes, view)
        large = ((boxes[:, 2:] - boxes[:, :2]) >= 1.0).all(axis=1)
        boxes, rows = boxes[large], rows[large]
    detections, stay = _detections(boxes, rows, columns, config, view)
    extras = rows[stay, len(config.columns) :]
    if config.keypoints:
        detections = _with_keypoints(detections, extras, config, view)
        extras = extras[:, config.keypoints * config.keypoint_values :]
    if not config.masks:
        return detections
    prototypes = output_of(outputs, config.masks)[0]
    return with_prototype_masks(detections, boxes[stay], extras, prototypes, view)


def class_rows_outputs(config: ClassRows, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the output of `class_rows`."""
    return (Expected("output", config.output, (1, "rows", Size((CLASSES,), plus=4))),)


def decode_class_rows(outputs: Outputs, config: ClassRows, view: View) -> Detections:
    """Return the rows whose best class is above the threshold."""
    rows = output_of(outputs, config.output)[0]
    scores = np.ascontiguousarray(rows[:, 4:])
    chosen = choose_rows(scores, config.score_threshold)
    return formatted_detections(rows[chosen.cells, :4], chosen, config, view)


def _boxes(rows: NDArray[Any], columns: dict[Any, int], config: Rows, view: View) -> NDArray[Any]:
    """Return x1, y1, x2, y2 in input pixels; with an angle, centre, sides and angle."""
    names = CENTRE if "cx" in columns else CORNERS
    boxes = scale_to_pixels(rows[:, [columns[name] for name in names]], config.unit, view)
    if "angle" in columns:
        return np.column_stack([boxes, rows[:, columns["angle"]]])
    return corners_of(boxes) if names is CENTRE else boxes


def _detections(
    boxes: NDArray[Any], rows: NDArray[Any], columns: dict[Any, int], config: Rows, view: View
) -> tuple[Detections, Indices]:
    find = rotated_detections if "angle" in columns else detections_of
    return find(
        boxes, rows[:, columns["score"]], rows[:, columns["class"]].astype(np.int64), config, view
    )


def _with_keypoints(
    detections: Detections, extras: NDArray[Any], config: Rows, view: View
) -> Detections:
    values = config.keypoint_values
    points = extras[:, : config.keypoints * values].reshape(-1, config.keypoints, values)
    scores = points[..., 2] if values == 3 else None
    return replace(detections, keypoints=keypoints_of(points[..., :2], scores, view, clip=True))
