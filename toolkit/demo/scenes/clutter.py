"""Clutter: distractors of no class that occlude objects."""

from collections.abc import Sequence

import cv2
import numpy as np

from toolkit.demo.scenes.backgrounds import crop_any
from toolkit.demo.scenes.drawing import Sprite
from toolkit.demo.scenes.geometry import Floats, Image, Rng
from toolkit.demo.scenes.objects import pick_grey, pick_hue


def _outline(rng: Rng) -> Floats:
    """Choose a shape within the unit circle: bar, triangle, ellipse or blob, float32 [n, 2]."""
    kind = rng.random()
    if kind < 0.4:
        return np.array([[-0.7, -0.7], [0.7, -0.7], [0.7, 0.7], [-0.7, 0.7]], np.float32)
    if kind < 0.5:
        return np.asarray(rng.uniform(-1, 1, (3, 2)), np.float32)
    angle = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    reach = np.ones(40)
    if kind > 0.65:
        for wave in range(1, 6):
            reach += rng.normal(0, 0.22 / wave) * np.sin(wave * angle + rng.uniform(0, 7))
        reach = np.clip(reach / reach.max(), 0.2, 1)
    return np.asarray(reach[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1), np.float32)


def _material(rng: Rng, photos: Sequence[Image], side: int) -> Image:
    """Fill a square with one colour, stripes or a piece of a photograph, and shade it."""
    kind = rng.random()
    if kind < 0.45:
        colour = crop_any(rng, photos, side, side)
    else:
        main = pick_grey(rng, 5, 240) if kind < 0.65 else pick_hue(rng, (0, 180), (0, 220))
        colour = np.full((side, side, 3), np.clip(main, 0, 255), np.uint8)
    if 0.6 < kind < 0.8:
        colour[:, np.arange(side) % int(rng.integers(8, 32)) < 5] = pick_hue(
            rng, (0, 180), (0, 200)
        )
    shade = rng.uniform(0.35, 1.1, (2, 2)).astype(np.float32)
    field = cv2.resize(shade, (side, side))
    return np.asarray(cv2.multiply(colour, cv2.merge([field] * 3), dtype=cv2.CV_8U), np.uint8)


def draw_clutter(
    rng: Rng, photos: Sequence[Image], width: int, height: int, longest: float
) -> Sprite:
    """Draw a distractor of no class, up to `longest` pixels long."""
    length = longest * float(np.exp(rng.uniform(np.log(0.15), 0)))
    thick = length * float(np.exp(rng.uniform(np.log(0.1), 0)))
    angle, side = rng.uniform(0, np.pi), int(length) + 4
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    shape = (_outline(rng) * (length / 2, thick / 2)) @ turn
    mask = np.zeros((side, side), np.uint8)
    scales = (1.0, rng.uniform(0.7, 0.95)) if rng.random() < 0.2 else (1.0,)  # at times a frame
    for scale, value in zip(scales, (255, 0), strict=False):
        polygon = np.rint((shape * scale + side / 2) * 16).astype(np.int32)
        cv2.fillPoly(mask, [polygon], value, cv2.LINE_AA, 4)
    x, y = rng.uniform(0, width) - side / 2, rng.uniform(0, height) - side / 2
    return Sprite(_material(rng, photos, side), mask, int(x), int(y))
