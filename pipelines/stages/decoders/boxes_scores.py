"""Boxes beside scores, before suppression: SSD, UltraFace, YOLO-NAS and PP-YOLOE without NMS."""

import numpy as np

from pipelines.config import PreprocessConfig
from pipelines.decode_config import Background, BoxesScores
from pipelines.results import Detections
from pipelines.stages.decoders.candidates import (
    Outputs,
    choose_columns,
    choose_rows,
    formatted_detections,
    output_of,
)
from pipelines.stages.decoders.expected import CLASSES, Expected, Size
from pipelines.stages.view import View

FOREGROUND: dict[Background, slice] = {
    "none": slice(None),
    "first": slice(1, None),
    "last": slice(None, -1),
}


def boxes_scores_outputs(config: BoxesScores, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the outputs of `boxes_scores`."""
    classes = Size((CLASSES,), plus=int(config.background != "none"))
    axes = (1, "anchors", classes) if config.class_axis == 2 else (1, classes, "anchors")
    return (
        Expected("boxes", config.boxes, (1, "anchors", 4)),
        Expected("scores", config.scores, axes),
    )


def decode_boxes_scores(outputs: Outputs, config: BoxesScores, view: View) -> Detections:
    """Return the boxes of the best anchors."""
    scores = output_of(outputs, config.scores)[0]
    foreground = FOREGROUND[config.background]
    if config.class_axis == 1:
        chosen = choose_columns(scores[foreground], config.score_threshold)
    else:
        chosen = choose_rows(np.ascontiguousarray(scores[:, foreground]), config.score_threshold)
    boxes = output_of(outputs, config.boxes)[0][chosen.cells]
    return formatted_detections(boxes, chosen, config, view)
