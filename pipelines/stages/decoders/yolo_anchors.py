"""Raw heads of YOLOv5 and YOLOv7, whose anchors are not in the file.

centre = (2 s - 0.5 + cell) stride      size = (2 s)^2 anchor      s = sigmoid of the output
score  = s(objectness) s(class)
"""

import numpy as np

from device.errors import PipelineError
from pipelines.config import PreprocessConfig
from pipelines.decode_config import YoloAnchors
from pipelines.results import Detections
from pipelines.stages.decoders.candidates import (
    Floats,
    Outputs,
    best_of,
    corners_of,
    detections_of,
    output_of,
    sigmoid,
)
from pipelines.stages.decoders.expected import CLASSES, Expected, Size
from pipelines.stages.view import View

ANCHORS = 3  # of a cell


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
    return detections_of(
        corners_of(boxes[best]),
        scores[best],
        class_ids[best],
        view,
        max_detections=config.max_detections,
        iou_threshold=config.iou_threshold,
    )[0]


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
