"""Rotated boxes: from input pixels to the frame, with their upright frames."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.decode_config import Scored
from pipelines.results import Detections
from pipelines.stages.decoders.candidates import Floats, Indices, clip_to_frame
from pipelines.stages.nms import suppress_rotated
from pipelines.stages.view import View


def rotated_detections(
    rotated: NDArray[Any], scores: NDArray[Any], class_ids: NDArray[Any], config: Scored, view: View
) -> tuple[Detections, Indices]:
    """Return detections with rotated boxes, best first, and the row of each.

    `rotated` [M, 5]: centre x, centre y, width, height in input pixels, angle in radians.
    """
    solid = (rotated[:, 2:4] > 0.0).all(axis=1) & np.isfinite(rotated).all(axis=1)
    rows = np.flatnonzero(solid)
    limit, max_iou = config.max_detections, config.max_iou
    if max_iou is None:
        rows = rows[np.argsort(-scores[rows], kind="stable")[:limit]]
    else:
        rows = rows[suppress_rotated(rotated[rows], scores[rows], class_ids[rows], max_iou, limit)]
    placed = rotated_to_frame(rotated[rows], view)
    boxes, shown = clip_to_frame(upright(placed), view)
    shown &= np.isfinite(placed).all(axis=1)
    rows = rows[shown]
    detections = Detections(
        boxes[shown],
        scores[rows].astype(np.float32, copy=False),
        class_ids[rows].astype(np.int64, copy=False),
    )
    return replace(detections, rotated=placed[shown]), rows


def rotated_to_frame(rotated: NDArray[Any], view: View) -> Floats:
    """Return rotated boxes [M, 5] in frame pixels, angles from -pi/2 to pi/2.

    Where the two sides are scaled differently, a rectangle becomes a parallelogram: the lengths of
    its sides and the direction of its width stay.
    """
    geometry = view.geometry
    scale = np.array([geometry.scale_x, geometry.scale_y])
    angle = rotated[:, 4].astype(np.float64)
    along = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    across = np.stack([-along[:, 1], along[:, 0]], axis=1)
    along, across = along * rotated[:, 2:3] / scale, across * rotated[:, 3:4] / scale
    angle = np.arctan2(along[:, 1], along[:, 0])
    angle = (angle + np.pi / 2.0) % np.pi - np.pi / 2.0  # half a turn changes nothing
    centres = geometry.points_to_frame(rotated[:, :2])
    sides = [np.hypot(*along.T), np.hypot(*across.T), angle]
    return np.column_stack([centres, *sides]).astype(np.float32)


def upright(rotated: NDArray[Any]) -> Floats:
    """Return the upright frames x1, y1, x2, y2 of rotated boxes [M, 5]."""
    cos, sin = np.abs(np.cos(rotated[:, 4])), np.abs(np.sin(rotated[:, 4]))
    half_x = (rotated[:, 2] * cos + rotated[:, 3] * sin) / 2.0
    half_y = (rotated[:, 2] * sin + rotated[:, 3] * cos) / 2.0
    half = np.stack([half_x, half_y], axis=1)
    return np.concatenate([rotated[:, :2] - half, rotated[:, :2] + half], axis=1).astype(np.float32)


def corners_of_rotated(rotated: NDArray[Any]) -> Floats:
    """Return the corners [M, 4, 2] of rotated boxes [M, 5], in order."""
    cos, sin = np.cos(rotated[:, 4]), np.sin(rotated[:, 4])
    along = np.stack([cos, sin], axis=1) * rotated[:, 2:3] / 2.0
    across = np.stack([-sin, cos], axis=1) * rotated[:, 3:4] / 2.0
    centre = rotated[:, :2]
    corners = [centre - along - across, centre + along - across]
    corners += [centre + along + across, centre - along + across]
    return np.stack(corners, axis=1).astype(np.float32)
