"""A canvas that tracks how much of each object is visible."""

from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from toolkit.demo.scenes.drawing import Sprite
from toolkit.demo.scenes.geometry import Image

Mask = npt.NDArray[np.bool_]

MIN_VISIBLE = 0.35  # of an object's pixels; below it a person would not name the object either


@dataclass(frozen=True, slots=True)
class Box:
    """A labelled object: `class_id` indexes CLASSES, corners are in pixels, x2 and y2 exclusive."""

    class_id: int
    x1: float
    y1: float
    x2: float
    y2: float


class Canvas:
    """An image, and the object that owns each pixel (0: none, k: the k-th)."""

    def __init__(self, image: Image) -> None:
        self.image = image
        self.owner = np.zeros(image.shape[:2], np.int16)
        # Entry k describes object k: its class, its pixels, those still visible. 0 is the rest.
        self.classes = [-1]
        self.areas = np.zeros(1, np.int64)
        self.visible = np.zeros(1, np.int64)

    def window(self, sprite: Sprite) -> tuple[slice, slice, slice, slice]:
        """Return slices of the image (rows, columns) and of the sprite where the two overlap."""
        height, width, h, w = *self.image.shape[:2], *sprite.mask.shape[:2]
        top, left = max(sprite.y, 0), max(sprite.x, 0)
        bottom, right = max(min(sprite.y + h, height), top), max(min(sprite.x + w, width), left)
        rows, columns = slice(top, bottom), slice(left, right)
        inner = slice(top - sprite.y, bottom - sprite.y), slice(left - sprite.x, right - sprite.x)
        return rows, columns, *inner

    def fits(self, sprite: Sprite) -> bool:
        """Whether the sprite and all objects under it stay visible enough to label."""
        rows, columns, inner_rows, inner_columns = self.window(sprite)
        solid = sprite.mask[inner_rows, inner_columns] > 127
        if np.count_nonzero(solid) < MIN_VISIBLE * np.count_nonzero(sprite.mask > 127):
            return False
        visible = self.visible - self._count(rows, columns, solid)
        return bool(np.all(visible[1:] >= MIN_VISIBLE * self.areas[1:]))

    def paint(self, sprite: Sprite, class_id: int | None) -> None:
        """Paste a sprite; with `class_id` None it is clutter that hides objects."""
        rows, columns, inner_rows, inner_columns = self.window(sprite)
        mask = sprite.mask[inner_rows, inner_columns]
        under = self.image[rows, columns].astype(np.float32)
        over = sprite.colour[inner_rows, inner_columns] - under
        mixed = under + over * (mask.astype(np.float32) / 255)[..., None]
        self.image[rows, columns] = np.rint(mixed)
        solid = mask > 127
        self.visible -= self._count(rows, columns, solid)
        if class_id is not None:
            self.classes.append(class_id)
            self.areas = np.append(self.areas, np.count_nonzero(sprite.mask > 127))
            self.visible = np.append(self.visible, np.count_nonzero(solid))
        self.owner[rows, columns][solid] = 0 if class_id is None else len(self.areas) - 1

    def _count(self, rows: slice, columns: slice, solid: Mask) -> npt.NDArray[np.int64]:
        """Count each object's pixels under a sprite."""
        return np.bincount(self.owner[rows, columns][solid], minlength=len(self.areas))

    def darken(self, sprite: Sprite, offset: tuple[int, int], strength: float) -> None:
        """Lay the sprite's soft shadow on what is painted so far."""
        pad = max(sprite.mask.shape) // 6 + 2
        soft = np.asarray(cv2.blur(np.pad(sprite.mask, pad), (pad, pad)), np.uint8)
        moved = Sprite(sprite.colour, soft, sprite.x - pad + offset[0], sprite.y - pad + offset[1])
        rows, columns, inner_rows, inner_columns = self.window(moved)
        fade = 1 - soft[inner_rows, inner_columns].astype(np.float32) * (strength / 255)
        self.image[rows, columns] = self.image[rows, columns] * fade[..., None]

    def boxes(self) -> tuple[Box, ...]:
        """Return tight boxes around the visible pixels of every object that is visible enough."""
        boxes = []
        for number in range(1, len(self.areas)):
            if self.visible[number] < max(MIN_VISIBLE * self.areas[number], 1):
                continue
            owned = self.owner == number
            rows, columns = np.flatnonzero(owned.any(axis=1)), np.flatnonzero(owned.any(axis=0))
            corners = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
            boxes.append(Box(self.classes[number], *(float(v) for v in corners)))
        return tuple(boxes)
