"""Masks in pixels of the frame: enlarged when a sink asks, as bits or as polygons."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.results import Detections
from pipelines.vision import cv2

TOLERANCE_PX = 1.0  # how far a polygon may leave the outline


def mask_bits(detections: Detections, index: int) -> tuple[NDArray[np.bool_], int, int]:
    """Return the mask of a detection inside its box, bool [h, w], and the place of its corner in
    the frame, x and y.

    Raises ValueError: the detections have no masks.
    """
    if detections.masks is None:
        raise ValueError("these detections have no masks")
    x1, y1, x2, y2 = detections.boxes[index].tolist()
    left, top = math.floor(x1), math.floor(y1)
    columns, rows = max(math.ceil(x2) - left, 1), max(math.ceil(y2) - top, 1)
    crop = detections.masks.crops[index]
    left_of, top_of, right_of, bottom_of = detections.masks.regions[index].tolist()
    step_x = crop.shape[1] / (right_of - left_of)
    step_y = crop.shape[0] / (bottom_of - top_of)
    # The middle of pixel 0 of the box, in the crop whose first cell has its middle at 0.
    start_x = (left + 0.5 - left_of) * step_x - 0.5
    start_y = (top + 0.5 - top_of) * step_y - 0.5
    matrix = np.array([[step_x, 0.0, start_x], [0.0, step_y, start_y]])
    enlarged = cv2.warpAffine(
        np.ascontiguousarray(crop),
        matrix,
        (columns, rows),
        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REPLICATE,
    )
    return np.asarray(enlarged > 0.0), left, top


def mask_on(
    canvas: NDArray[Any], detections: Detections, index: int
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return the part of a frame [H, W] or [H, W, C] in the box of a detection, a view, and its
    mask there. ValueError as `mask_bits`."""
    bits, x, y = mask_bits(detections, index)
    bits, x, y = bits[max(0, -y) :, max(0, -x) :], max(0, x), max(0, y)
    part = canvas[y : y + bits.shape[0], x : x + bits.shape[1]]
    return part, bits[: part.shape[0], : part.shape[1]]


def mask_polygons(detections: Detections, index: int) -> list[NDArray[Any]]:
    """Return the outlines of a mask: int32 [points, 2] each, in frame pixels. Holes are filled."""
    bits, left, top = mask_bits(detections, index)
    contours, _ = cv2.findContours(
        bits.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE, offset=(left, top)
    )
    outlines = [cv2.approxPolyDP(contour, TOLERANCE_PX, True) for contour in contours]
    return [outline.reshape(-1, 2) for outline in outlines if len(outline) >= 3]
