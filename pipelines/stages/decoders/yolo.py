"""YOLO heads with a row for each anchor: YOLOv5, YOLOv6, YOLOv7 and YOLOX.

A row is centre, width, height, objectness and class probabilities; score = objectness * class. The
raw heads of YOLOv5 and YOLOv7 are logits, and their anchors are not in the file:

    centre = (2 s - 0.5 + cell) stride      size = (2 s)^2 anchor      s = sigmoid of the output
"""

import numpy as np

from device.errors import PipelineError
from pipelines.config import PreprocessConfig
from pipelines.decode_config import YoloAnchors, Yolov5, Yolox
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
    sigmoid,
)
from pipelines.stages.decoders.expected import CLASSES, COEFFICIENTS, Expected, Size
from pipelines.stages.decoders.grid import cell_count
from pipelines.stages.decoders.masks import prototypes_output, with_prototype_masks
from pipelines.stages.view import View

ANCHORS = 3  # of a cell


def yolov5_outputs(config: Yolov5, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the outputs of `yolov5`."""
    names = (CLASSES, COEFFICIENTS) if config.masks else (CLASSES,)
    rows = Expected("output", config.output, (1, "anchors", Size(names, plus=5)))
    return (prototypes_output(config.masks), rows) if config.masks else (rows,)


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
    detections, stay = detections_of(boxes, chosen.scores, chosen.class_ids, config, view)
    if not config.masks:
        return detections
    coefficients = rows[chosen.cells[stay], end:]
    return with_prototype_masks(detections, boxes[stay], coefficients, prototypes, view)


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
    return detections_of(corners_of(boxes), chosen.scores, chosen.class_ids, config, view)[0]


def _choose(rows: Floats, threshold: float) -> Candidates:
    """Choose the best of rows [A, 5+C]. The product is at most the objectness, which thins them."""
    likely = np.flatnonzero(rows[:, 4] >= threshold)
    scores = rows[likely, 5:] * rows[likely, 4:5]
    best = scores.max(axis=1, initial=-np.inf)
    chosen = best_of(best, threshold)
    return Candidates(likely[chosen], best[chosen], scores[chosen].argmax(axis=1))


def yolo_anchors_outputs(config: YoloAnchors, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the outputs of `yolo_anchors`: one of each stride."""
    strides, anchors = len(config.strides), len(config.anchors)
    if anchors != ANCHORS * strides:
        raise PipelineError(
            f"[decode] of kind yolo_anchors has {anchors} anchors for {strides} strides: give"
            f" {ANCHORS * strides}, {ANCHORS} for each stride in its order."
        )
    columns = Size((CLASSES,), plus=5)
    return tuple(
        Expected(
            f"outputs[{level}]",
            config.outputs[level] if level < len(config.outputs) else "",
            (1, ANCHORS, -(-preprocess.height // stride), -(-preprocess.width // stride), columns),
        )
        for level, stride in enumerate(config.strides)
    )


def decode_yolo_anchors(outputs: Outputs, config: YoloAnchors, view: View) -> Detections:
    """Return boxes; logits become numbers only where an object may be."""
    levels = [
        _level(output_of(outputs, name)[0], config, level)
        for level, name in enumerate(config.outputs)
    ]
    boxes, scores, class_ids = (np.concatenate(parts) for parts in zip(*levels, strict=True))
    best = best_of(scores, config.score_threshold)
    return detections_of(corners_of(boxes[best]), scores[best], class_ids[best], config, view)[0]


def _level(head: Floats, config: YoloAnchors, level: int) -> tuple[Floats, Floats, Floats]:
    """Return boxes [N, 4], scores and classes of one head [3, h, w, 5+C] above the threshold."""
    threshold = np.clip(config.score_threshold, 1e-6, 1 - 1e-6)
    # The product of two sigmoids is at most the first.
    anchor, row, column = np.nonzero(head[..., 4] >= np.log(threshold / (1 - threshold)))
    rows = sigmoid(head[anchor, row, column])
    scores = rows[:, 5:] * rows[:, 4:5]
    cells = np.stack([column, row], axis=1).astype(np.float32)
    sides = np.asarray(config.anchors, np.float32)[ANCHORS * level :][:ANCHORS][anchor]
    centres = (2 * rows[:, :2] - 0.5 + cells) * config.strides[level]
    boxes = np.concatenate([centres, (2 * rows[:, 2:4]) ** 2 * sides], axis=1)
    return boxes, scores.max(axis=1, initial=0.0), scores.argmax(axis=1)
