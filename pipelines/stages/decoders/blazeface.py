"""BlazeFace: centre, sides and six points of faces, in pixels from the centre of each cell.

Bazarevsky et al. 2019; layouts of MediaPipe's models: anchors of one size, several a cell.
"""

from dataclasses import replace

import numpy as np

from device.errors import PipelineError
from pipelines.config import PreprocessConfig
from pipelines.decode_config import Blazeface
from pipelines.results import Detections
from pipelines.stages.decoders.candidates import (
    Outputs,
    best_of,
    cells_of,
    corners_of,
    detections_of,
    keypoints_of,
    output_of,
    sigmoid,
)
from pipelines.stages.decoders.expected import Expected
from pipelines.stages.decoders.grid import cell_count
from pipelines.stages.nms import merge_weighted
from pipelines.stages.view import View

POINTS = 6


def blazeface_outputs(config: Blazeface, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the outputs of `blazeface`."""
    if len(config.anchors) != len(config.strides):
        raise PipelineError(
            f"[decode] of kind blazeface has {len(config.anchors)} numbers of anchors for"
            f" {len(config.strides)} strides: give one for each stride, in its order."
        )
    count = anchor_count(config.strides, config.anchors, preprocess.width, preprocess.height)
    return (
        Expected("boxes", config.boxes, (1, count, 4 + 2 * POINTS)),
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
    size = (view.input_width, view.input_height)
    centres = np.concatenate(
        [
            cells_of((stride,), *size, 0.5, number)[0]
            for stride, number in zip(config.strides, config.anchors, strict=True)
        ]
    )
    rows = output_of(outputs, config.boxes)[0, faces]
    boxes = corners_of(np.concatenate([centres[faces] + rows[:, :2], rows[:, 2:4]], axis=1))
    points = centres[faces, None] + rows[:, 4:].reshape(-1, POINTS, 2)
    places = np.concatenate([boxes, points.reshape(-1, 2 * POINTS)], axis=1)
    solid = (boxes[:, 2:] > boxes[:, :2]).all(axis=1) & np.isfinite(places).all(axis=1)
    places, best = merge_weighted(
        places[solid], scores[faces[solid]], config.iou_threshold, config.max_detections
    )
    detections, kept = detections_of(
        places[:, :4],
        best,
        np.zeros(len(best), np.int64),
        view,
        max_detections=config.max_detections,
    )
    points = places[kept, 4:].reshape(-1, POINTS, 2)
    return replace(detections, keypoints=keypoints_of(points, None, view))
