"""Labels of a drawn frame: written last, inside the frame, none over another."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.frame import Image
from pipelines.vision import cv2

BGR = tuple[int, int, int]
Rectangle = tuple[int, int, int, int]  # x1, y1, x2, y2
Places = NDArray[np.int64]  # [K, 4]

FONT = cv2.FONT_HERSHEY_SIMPLEX
FONT_SIZE = 0.45
MARGIN = 3  # around a text
BRIGHT = 130  # luma from which a text on a colour is black
LUMA = (0.114, 0.587, 0.299)  # of B, G, R
WIDTH_OF_SCALE_1 = 960  # larger frames have larger texts: a page or a screen shows them smaller
MAX_SCALE = 4.0
STACKED = 12  # places below each other that are tried


@dataclass(frozen=True, slots=True)
class Label:
    """A text on a colour beside the rectangle of what it names. `fixed`: at its upper left corner,
    whatever is there."""

    text: str
    around: Rectangle
    color: BGR
    fixed: bool = False


def scale_of(image: Image) -> float:
    """Return how much larger than usual lines and texts are in an image."""
    longer = max(image.shape[:2])
    return float(min(max(longer / WIDTH_OF_SCALE_1, 1.0), MAX_SCALE))


def write_labels(canvas: Image, labels: Sequence[Label]) -> None:
    """Write labels on an image, uint8 [H, W, 3] BGR; the first ones have the first choice."""
    scale = scale_of(canvas)
    thickness = max(1, round(scale))
    sizes = [cv2.getTextSize(label.text, FONT, FONT_SIZE * scale, thickness)[0] for label in labels]
    places = place_labels(labels, sizes, (canvas.shape[1], canvas.shape[0]), round(MARGIN * scale))
    for label, (x1, y1, x2, y2) in zip(labels, places, strict=True):
        luma = sum(part * share for part, share in zip(label.color, LUMA, strict=True))
        ink = (0, 0, 0) if luma >= BRIGHT else (255, 255, 255)
        cv2.rectangle(canvas, (x1, y1), (x2 - 1, y2 - 1), label.color, cv2.FILLED)
        at = (x1 + round(MARGIN * scale), y2 - 1 - round(MARGIN * scale))
        cv2.putText(canvas, label.text, at, FONT, FONT_SIZE * scale, ink, thickness, cv2.LINE_AA)


def place_labels(
    labels: Sequence[Label],
    sizes: Sequence[Sequence[int]],
    frame: tuple[int, int],
    margin: int,
) -> list[Rectangle]:
    """Return where labels go, in pixels: above what they name, else in it, below it, or further
    down where others lie there. One that finds no free place goes to its first one.

    `sizes`: (width, height) of each text; `frame`: width and height of the image.
    """
    taken = np.empty((len(labels), 4), np.int64)
    for row, (label, (width, height)) in enumerate(zip(labels, sizes, strict=True)):
        size = (width + 2 * margin, height + 2 * margin)
        first, *others = _corners(label, *size)
        taken[row] = place = _inside([first], size, frame)[0]
        if label.fixed or _are_free(place[None], taken[:row]).all():
            continue
        places = _inside(others, size, frame)
        free = np.flatnonzero(_are_free(places, taken[:row]))
        if len(free):
            taken[row] = places[free[0]]
    return [(x1, y1, x2, y2) for x1, y1, x2, y2 in taken.tolist()]


def _corners(label: Label, width: int, height: int) -> list[tuple[int, int]]:
    """Return upper left corners that a label may have, the best one first."""
    x1, y1, x2, y2 = label.around
    if label.fixed:
        return [(x1, y1)]
    right = x2 - width
    return [
        *((x1, y1 - height), (x1, y1), (right, y1 - height), (right, y1)),
        *((x1, y2), (x1, y2 - height)),
        *((x1, y1 + row * height) for row in range(1, STACKED)),
        *((x1, y1 - row * height) for row in range(2, STACKED)),
    ]


def _inside(
    corners: Sequence[tuple[int, int]], size: tuple[int, int], frame: tuple[int, int]
) -> Places:
    """Return rectangles [K, 4] of a size at corners, moved into the frame."""
    last = [max(side - label_side, 0) for side, label_side in zip(frame, size, strict=True)]
    places = np.clip(np.array(corners, np.int64), 0, last)
    return np.concatenate([places, places + size], axis=1)


def _are_free(places: Places, taken: Places) -> NDArray[np.bool_]:
    """Return which rectangles [K, 4] overlap none of `taken` [T, 4]."""
    before = places[:, None, :2] < taken[None, :, 2:]
    after = places[:, None, 2:] > taken[None, :, :2]
    apart = ~np.all(np.logical_and(before, after), axis=2)
    return np.asarray(np.all(apart, axis=1))
