"""Ultralytics' raw heads [1, 4+C+extras, A]: detect, segment, pose and oriented boxes.

Boxes are decoded in the graph: centre, width and height in input pixels; scores are probabilities.
What is left: the best class, suppression, and the extras of the cells that stay.
"""

from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from pipelines.config import PreprocessConfig
from pipelines.decode_config import (
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
from pipelines.stages.decoders.expected import (
    CLASSES,
    COEFFICIENTS,
    MAP_HEIGHT,
    MAP_WIDTH,
    Expected,
    Size,
)
from pipelines.stages.decoders.masks import prototype_crop, with_masks
from pipelines.stages.decoders.rotated import rotated_detections
from pipelines.stages.view import View

Head = UltralyticsDetect | UltralyticsSegment | UltralyticsPose | UltralyticsObb


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """Detections, the boxes in input pixels that they came from, and their cells."""

    detections: Detections
    boxes: NDArray[Any]
    cells: Indices


def detect_outputs(config: UltralyticsDetect, preprocess: PreprocessConfig) -> tuple[Expected, ...]:
    """Return the output of `ultralytics_detect`."""
    return (Expected("output", config.output, (1, Size((CLASSES,), plus=4), "cells")),)


def segment_outputs(
    config: UltralyticsSegment, preprocess: PreprocessConfig
) -> tuple[Expected, ...]:
    """Return the outputs of `ultralytics_segment`."""
    channels = Size((CLASSES, COEFFICIENTS), plus=4)
    return (
        Expected("masks", config.masks, (1, COEFFICIENTS, MAP_HEIGHT, MAP_WIDTH)),
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
    return _detect(output_of(outputs, config.output)[0], 0, config, view).detections


def decode_segment(outputs: Outputs, config: UltralyticsSegment, view: View) -> Detections:
    """Return boxes and masks."""
    prototypes = output_of(outputs, config.masks)[0]
    head = output_of(outputs, config.output)[0]
    kept = _detect(head, len(prototypes), config, view)
    coefficients = head[-len(prototypes) :, kept.cells].T
    crop = prototype_crop(coefficients, prototypes)
    height, width = prototypes.shape[1:]
    return with_masks(kept.detections, kept.boxes, crop, (height, width), view)


def decode_pose(outputs: Outputs, config: UltralyticsPose, view: View) -> Detections:
    """Return boxes and keypoints."""
    head = output_of(outputs, config.output)[0]
    values = config.keypoint_values
    extras = config.keypoints * values
    kept = _detect(head, extras, config, view)
    points = head[-extras:, kept.cells].T.reshape(-1, config.keypoints, values)
    scores = points[..., 2] if values == 3 else None
    keypoints = keypoints_of(points[..., :2], scores, view, clip=True)
    return replace(kept.detections, keypoints=keypoints)


def decode_obb(outputs: Outputs, config: UltralyticsObb, view: View) -> Detections:
    """Return rotated boxes."""
    head = output_of(outputs, config.output)[0]
    chosen = choose_columns(head[4:-1], config.score_threshold)
    rotated = head[[0, 1, 2, 3, -1]][:, chosen.cells].T
    return rotated_detections(
        rotated,
        chosen.scores,
        chosen.class_ids,
        view,
        max_detections=config.max_detections,
        iou_threshold=config.iou_threshold,
    )[0]


def _detect(head: NDArray[Any], extras: int, config: Head, view: View) -> _Kept:
    """Detect with a head [4+C+extras, A]."""
    scores = head[4 : len(head) - extras]
    chosen = choose_columns(scores, config.score_threshold)
    boxes = corners_of(head[:4, chosen.cells].T)
    detections, rows = detections_of(
        boxes,
        chosen.scores,
        chosen.class_ids,
        view,
        max_detections=config.max_detections,
        iou_threshold=config.iou_threshold,
    )
    return _Kept(detections, boxes[rows], chosen.cells[rows])
