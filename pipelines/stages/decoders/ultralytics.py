"""Ultralytics' raw heads [1, 4+C+extras, A]: detect, segment, pose and oriented boxes.

Boxes are decoded in the graph: centre, width and height in input pixels; scores are probabilities.
What remains: the best class, suppression, and the extras of the cells that stay.
"""

from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from pipelines.config import PreprocessConfig
from pipelines.decode_config import (
    Scored,
    UltralyticsDetect,
    UltralyticsObb,
    UltralyticsPose,
    UltralyticsSegment,
)
from pipelines.results import Detections
from pipelines.stages.decoders.candidates import (
    Indices,
    Outputs,
    choose_columns,
    corners_of,
    detections_of,
    keypoints_of,
    output_of,
)
from pipelines.stages.decoders.expected import CLASSES, COEFFICIENTS, Expected, Size
from pipelines.stages.decoders.masks import prototypes_output, with_prototype_masks
from pipelines.stages.decoders.rotated import rotated_detections
from pipelines.stages.native import native_stages
from pipelines.stages.view import View


def detect_outputs(config: UltralyticsDetect, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the output of `ultralytics_detect`."""
    return (Expected("output", config.output, (1, Size((CLASSES,), plus=4), "cells")),)


def segment_outputs(
    config: UltralyticsSegment, preprocess: PreprocessConfig
) -> tuple[Expected, ...]:
    """Return the outputs of `ultralytics_segment`."""
    channels = Size((CLASSES, COEFFICIENTS), plus=4)
    return (
        prototypes_output(config.masks),
        Expected("output", config.output, (1, channels, "cells")),
    )


def pose_outputs(config: UltralyticsPose, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the output of `ultralytics_pose`."""
    channels = Size((CLASSES,), plus=4 + config.keypoints * config.keypoint_values)
    return (Expected("output", config.output, (1, channels, "cells")),)


def obb_outputs(config: UltralyticsObb, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the output of `ultralytics_obb`."""
    return (Expected("output", config.output, (1, Size((CLASSES,), plus=5), "cells")),)


def decode_detect(outputs: Outputs, config: UltralyticsDetect, view: View) -> Detections:
    """Return boxes."""
    return _detect(output_of(outputs, config.output)[0], 0, config, view)[0]


def decode_segment(outputs: Outputs, config: UltralyticsSegment, view: View) -> Detections:
    """Return boxes and masks."""
    prototypes = output_of(outputs, config.masks)[0]
    head = output_of(outputs, config.output)[0]
    detections, boxes, cells = _detect(head, len(prototypes), config, view)
    coefficients = head[-len(prototypes) :, cells].T
    return with_prototype_masks(detections, boxes, coefficients, prototypes, view)


def decode_pose(outputs: Outputs, config: UltralyticsPose, view: View) -> Detections:
    """Return boxes and keypoints."""
    head = output_of(outputs, config.output)[0]
    values = config.keypoint_values
    extras = config.keypoints * values
    detections, _, cells = _detect(head, extras, config, view)
    points = head[-extras:, cells].T.reshape(-1, config.keypoints, values)
    scores = points[..., 2] if values == 3 else None
    keypoints = keypoints_of(points[..., :2], scores, view, clip=True)
    return replace(detections, keypoints=keypoints)


def decode_obb(outputs: Outputs, config: UltralyticsObb, view: View) -> Detections:
    """Return rotated boxes."""
    head = output_of(outputs, config.output)[0]
    chosen = choose_columns(head[4:-1], config.score_threshold)
    rotated = head[[0, 1, 2, 3, -1]][:, chosen.cells].T
    return rotated_detections(rotated, chosen.scores, chosen.class_ids, config, view)[0]


def _detect(
    head: NDArray[Any], extras: int, config: Scored, view: View
) -> tuple[Detections, NDArray[Any], Indices]:
    """Return what a head [4+C+extras, A] detects, with the boxes in input pixels and the cells."""
    scores = head[4 : len(head) - extras]
    native = native_stages()
    decoded = None if native is None else native.decode(head, len(scores), config, view)
    if decoded is not None:
        return decoded.detections, decoded.input_boxes, decoded.cells
    chosen = choose_columns(scores, config.score_threshold)
    boxes = corners_of(head[:4, chosen.cells].T)
    detections, rows = detections_of(boxes, chosen.scores, chosen.class_ids, config, view)
    return detections, boxes[rows], chosen.cells[rows]
