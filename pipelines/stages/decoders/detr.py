"""Transformers: a set of queries, each with class logits and a box; nothing is suppressed."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.config import PreprocessConfig
from pipelines.decode_config import Detr
from pipelines.results import Detections
from pipelines.stages.decoders.boxes_scores import FOREGROUND
from pipelines.stages.decoders.candidates import (
    Outputs,
    best_of,
    corners_of,
    detections_of,
    output_of,
    scale_to_pixels,
    sigmoid,
)
from pipelines.stages.decoders.expected import CLASSES, MAP_HEIGHT, MAP_WIDTH, Expected, Size
from pipelines.stages.decoders.masks import with_masks
from pipelines.stages.view import View


def detr_outputs(config: Detr, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the outputs of `detr`."""
    classes = Size((CLASSES,), plus=int(config.background != "none"))
    outputs = (
        Expected("boxes", config.boxes, (1, "queries", 4)),
        Expected("logits", config.logits, (1, "queries", classes)),
    )
    if not config.masks:
        return outputs
    return (*outputs, Expected("masks", config.masks, (1, "queries", MAP_HEIGHT, MAP_WIDTH)))


def decode_detr(outputs: Outputs, config: Detr, view: View) -> Detections:
    """Return the best queries; with "sigmoid" a query may be there with several classes."""
    logits = output_of(outputs, config.logits)[0]
    foreground = FOREGROUND[config.background]
    if config.activation == "softmax":
        probabilities = _softmax(logits)[:, foreground]
        classes = probabilities.argmax(axis=1)
        best = probabilities.max(axis=1)
        queries = best_of(best, config.score_threshold)
        scores, classes = best[queries], classes[queries]
    else:
        probabilities = sigmoid(logits[:, foreground])
        flat = probabilities.reshape(-1)
        places = best_of(flat, config.score_threshold)
        queries, classes = np.divmod(places, probabilities.shape[1])
        scores = flat[places]
    boxes = output_of(outputs, config.boxes)[0][queries]
    boxes = corners_of(scale_to_pixels(boxes, "fraction", view))
    detections, rows = detections_of(boxes, scores, classes, config, view)
    if not config.masks:
        return detections
    masks, shown = output_of(outputs, config.masks)[0], queries[rows].tolist()
    height, width = masks.shape[1:]
    return with_masks(
        detections,
        boxes[rows],
        lambda index, lines, columns: masks[shown[index], lines, columns],
        (height, width),
        view,
    )


def _softmax(logits: NDArray[Any]) -> NDArray[Any]:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    normalised: NDArray[Any] = powers / powers.sum(axis=1, keepdims=True)
    return normalised
