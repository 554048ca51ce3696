"""The pose of one person: MoveNet, RTMPose (SimCC) and heat maps (ViTPose, HRNet).

The person's score is the mean of those of the points, its box goes around the points that are
above the threshold.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.config import PreprocessConfig
from pipelines.decode_config import Heatmaps, Movenet, Simcc
from pipelines.results import Detections, no_detections
from pipelines.stages.decoders.candidates import (
    Outputs,
    clip_to_frame,
    keypoints_of,
    output_of,
)
from pipelines.stages.decoders.expected import MAP_HEIGHT, MAP_WIDTH, Expected
from pipelines.stages.view import View

QUARTER = 0.25  # of a cell: the peak lies towards its higher neighbour


def movenet_outputs(config: Movenet, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the output of `movenet`."""
    return (Expected("output", config.output, (1, 1, "keypoints", 3)),)


def simcc_outputs(config: Simcc, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the outputs of `simcc`."""
    steps = [round(side * config.split) for side in (preprocess.width, preprocess.height)]
    return (
        Expected("x", config.x, (1, "keypoints", steps[0])),
        Expected("y", config.y, (1, "keypoints", steps[1])),
    )


def heatmaps_outputs(config: Heatmaps, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the output of `heatmaps`."""
    return (Expected("output", config.output, (1, "keypoints", MAP_HEIGHT, MAP_WIDTH)),)


def decode_movenet(outputs: Outputs, config: Movenet, view: View) -> Detections:
    """Return one person, or none."""
    rows = output_of(outputs, config.output).reshape(-1, 3)  # y, x, score
    points = rows[:, [1, 0]] * np.array([view.input_width, view.input_height], np.float32)
    return _person(points, rows[:, 2], config.score_threshold, view)


def decode_simcc(outputs: Outputs, config: Simcc, view: View) -> Detections:
    """Return one person, or none; a point's score is the lower of its two peaks."""
    x, y = output_of(outputs, config.x)[0], output_of(outputs, config.y)[0]
    points = np.stack([x.argmax(axis=1), y.argmax(axis=1)], axis=1) / config.split
    scores = np.minimum(x.max(axis=1), y.max(axis=1))
    return _person(points, scores, config.score_threshold, view)


def decode_heatmaps(outputs: Outputs, config: Heatmaps, view: View) -> Detections:
    """Return one person, or none; peaks move a quarter cell towards the higher neighbour."""
    maps = output_of(outputs, config.output)[0]  # [K, h, w]
    count, height, width = maps.shape
    rows, columns = np.divmod(maps.reshape(count, -1).argmax(axis=1), width)
    each = np.arange(count)
    right, left = (maps[each, rows, np.clip(columns + s, 0, width - 1)] for s in (1, -1))
    below, above = (maps[each, np.clip(rows + s, 0, height - 1), columns] for s in (1, -1))
    inner_x = (columns > 0) & (columns < width - 1)
    inner_y = (rows > 0) & (rows < height - 1)
    x = columns + QUARTER * np.sign(right - left) * inner_x
    y = rows + QUARTER * np.sign(below - above) * inner_y
    cell = np.array([view.input_width / width, view.input_height / height])
    scores = maps[each, rows, columns]
    return _person(np.stack([x, y], axis=1) * cell, scores, config.score_threshold, view)


def _person(points: NDArray[Any], scores: NDArray[Any], threshold: float, view: View) -> Detections:
    keypoints = keypoints_of(points[None], scores[None], view)
    score = keypoints[0, :, 2].mean()
    sure = keypoints[0, keypoints[0, :, 2] >= threshold, :2]
    if not threshold <= score < np.inf or not len(sure):
        return replace(no_detections(), keypoints=keypoints[:0])
    around = np.concatenate([sure.min(axis=0), sure.max(axis=0)])[None]
    boxes, solid = clip_to_frame(around, view)
    rows = np.flatnonzero(solid)
    return Detections(
        boxes[rows],
        np.full(len(rows), score, np.float32),
        np.zeros(len(rows), np.int64),
        keypoints=keypoints[rows],
    )
