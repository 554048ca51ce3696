"""Masks of detections: cut around each box in the network's resolution."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.results import Detections, Masks
from pipelines.stages.decoders.expected import COEFFICIENTS, MAP_HEIGHT, MAP_WIDTH, Expected
from pipelines.stages.view import View

MARGIN = 1  # cells around a box, so that its border is interpolated as the inside is

Crop = Callable[[int, slice, slice], NDArray[Any]]  # detection, rows, columns -> logits [h, w]


def with_masks(
    detections: Detections,
    boxes: NDArray[Any],
    crop: Crop,
    map_shape: tuple[int, int],
    view: View,
) -> Detections:
    """Return detections with their masks.

    `boxes` [N, 4]: x1, y1, x2, y2 in input pixels. `crop` gives a part of a detection's map of
    `map_shape` (h, w), which covers the whole input: above 0 is inside, NaN is not.
    """
    height, width = map_shape
    cell_x, cell_y = view.input_width / width, view.input_height / height
    crops, areas = [], []
    boxes = np.clip(boxes, 0.0, [view.input_width, view.input_height] * 2)
    for index, (x1, y1, x2, y2) in enumerate(boxes.tolist()):
        left, right = _cells(x1 / cell_x, x2 / cell_x, width)
        top, bottom = _cells(y1 / cell_y, y2 / cell_y, height)
        logits = crop(index, slice(top, bottom), slice(left, right))
        crops.append(logits.astype(np.float32, copy=False))
        areas.append([left * cell_x, top * cell_y, right * cell_x, bottom * cell_y])
    regions = view.geometry.to_frame(np.array(areas, np.float32).reshape(-1, 4))
    return replace(detections, masks=Masks(tuple(crops), regions))


def prototypes_output(name: str) -> Expected:
    """Return the output that has the prototypes of masks."""
    return Expected("masks", name, (1, COEFFICIENTS, MAP_HEIGHT, MAP_WIDTH))


def with_prototype_masks(
    detections: Detections,
    boxes: NDArray[Any],
    coefficients: NDArray[Any],
    prototypes: NDArray[Any],
    view: View,
) -> Detections:
    """Return detections with masks that are sums of prototypes [M, h, w] (YOLACT).

    `boxes`: see `with_masks`; `coefficients` [N, M]. sigmoid(x) > 0.5 is x > 0.
    """
    count, height, width = prototypes.shape

    def crop(index: int, rows: slice, columns: slice) -> NDArray[Any]:
        part = prototypes[:, rows, columns]
        flat: NDArray[Any] = coefficients[index] @ part.reshape(count, -1)
        return flat.reshape(part.shape[1:])

    return with_masks(detections, boxes, crop, (height, width), view)


def _cells(start: float, end: float, count: int) -> tuple[int, int]:
    """Return the cells that an interval touches and MARGIN more: at least one, inside the map."""
    first = min(max(math.floor(start) - MARGIN, 0), count - 1)
    return first, min(max(math.ceil(end) + MARGIN, first + 1), count)
