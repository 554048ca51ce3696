"""YOLO heads with a row for each anchor: YOLOv5, YOLOv6, YOLOv7 and YOLOX.

A row is centre, width, height, objectness and class probabilities; score = objectness * class.
"""

import numpy as np

from pipelines.config import PreprocessConfig
from pipelines.decode_config import Yolov5, Yolox
from pipelines.results import Detections
from pipelines.stages.decoders.candidates import (
    Candidates,
    Floats,
    Outputs,
    best_of,
    cells_of,
    corners_of,
    detections_of,
    output_of,
)
from pipelines.stages.decoders.expected import (
    CLASSES,
    COEFFICIENTS,
    MAP_HEIGHT,
    MAP_WIDTH,
    Expected,
    Size,
)
from pipelines.stages.decoders.grid import cell_count
from pipelines.stages.decoders.masks import prototype_crop, with_masks
from pipelines.stages.view import View


def yolov5_outputs(config: Yolov5, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the outputs of `yolov5`."""
    if not config.masks:
        return (Expected("output", config.output, (1, "anchors", Size((CLASSES,), plus=5))),)
    columns = Size((CLASSES, COEFFICIENTS), plus=5)
    return (
        Expected("masks", config.masks, (1, COEFFICIENTS, MAP_HEIGHT, MAP_WIDTH)),
        Expected("output", config.output, (1, "anchors", columns)),
    )


def yolox_outputs(config: Yolox, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the output of `yolox`."""
    cells = cell_count(config.strides, preprocess.width, preprocess.height)
    return (Expected("output", config.output, (1, cells, Size((CLASSES,), plus=5))),)


def decode_yolov5(outputs: Outputs, config: Yolov5, view: View) -> Detections:
    """Return boxes, and masks if there are prototypes."""
    rows = output_of(outputs, config.output)[0]
    prototypes = output_of(outputs, config.masks)[0] if config.masks else np.empty((0, 1, 1))
    end = rows.shape[1] - len(prototypes)
    chosen = _choose(rows[:, :end], config.score_threshold)
    boxes = corners_of(rows[chosen.cells, :4])
    detections, kept = detections_of(
        boxes,
        chosen.scores,
        chosen.class_ids,
        view,
        max_detections=config.max_detections,
        iou_threshold=config.iou_threshold,
    )
    if not config.masks:
        return detections
    crop = prototype_crop(rows[chosen.cells[kept], end:], prototypes)
    height, width = prototypes.shape[1:]
    return with_masks(detections, boxes[kept], crop, (height, width), view)


def decode_yolox(outputs: Outputs, config: Yolox, view: View) -> Detections:
    """Return boxes; those of raw heads are decoded for the cells that are chosen alone."""
    rows = output_of(outputs, config.output)[0]
    chosen = _choose(rows, config.score_threshold)
    boxes = rows[chosen.cells, :4].astype(np.float32)
    if not config.decoded:
        points, strides = cells_of(config.strides, view.input_width, view.input_height, 0.0)
        stride = strides[chosen.cells, None]
        with np.errstate(over="ignore"):  # infinite sides are cut at the frame
            sides = np.exp(boxes[:, 2:]) * stride
        boxes = np.concatenate([points[chosen.cells] + boxes[:, :2] * stride, sides], axis=1)
    return detections_of(
        corners_of(boxes),
        chosen.scores,
        chosen.class_ids,
        view,
        max_detections=config.max_detections,
        iou_threshold=config.iou_threshold,
    )[0]


def _choose(rows: Floats, threshold: float) -> Candidates:
    """Choose the best of rows [A, 5+C]. The product is at most the objectness, which thins them."""
    likely = np.flatnonzero(rows[:, 4] >= threshold)
    scores = rows[likely, 5:] * rows[likely, 4:5]
    best = scores.max(axis=1, initial=-np.inf)
    chosen = best_of(best, threshold)
    return Candidates(likely[chosen], best[chosen], scores[chosen].argmax(axis=1))
