"""Images with ground truth, a function of (seed, index) alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.demo.scenes.backgrounds import draw_background
from toolkit.demo.scenes.camera import REFERENCE_WIDTH, blur, compress, expose, sense
from toolkit.demo.scenes.canvas import Box, Canvas
from toolkit.demo.scenes.clutter import draw_clutter
from toolkit.demo.scenes.drawing import draw, pick_lamp
from toolkit.demo.scenes.geometry import Image, Rng
from toolkit.demo.scenes.objects import CLASSES, pick_figure, pick_pose

TRAIN_SEED, CALIBRATION_SEED, HELD_OUT_SEED = 1, 2, 3

OBJECT_SIZE = (20.0, 160.0)  # longer side in pixels, for a scene 320 pixels wide


@dataclass(frozen=True, slots=True)
class Scene:
    """An image (uint8 [height, width, 3], BGR) and the objects in it."""

    image: Image
    boxes: tuple[Box, ...]


def _populate(rng: Rng, canvas: Canvas, photos: Sequence[Image]) -> None:
    """Place objects and clutter; skip what would occlude another object too much."""
    height, width = canvas.image.shape[:2]
    light, scale = pick_lamp(rng), min(width, height) / REFERENCE_WIDTH
    for _ in range(int(rng.integers(0, 6))):
        canvas.paint(draw_clutter(rng, photos, width, height, width * 0.8), None)
    smallest, largest = np.log(np.array(OBJECT_SIZE) * scale)
    shadow, strength = rng.uniform((-0.12, -0.06), (0.12, 0.18)), rng.uniform(0.0, 0.6)
    for _ in range(int(rng.integers(0, 8))):
        class_id = int(rng.integers(len(CLASSES)))
        size = float(np.exp(rng.uniform(smallest, largest)))
        margin = size * 0.35
        x, y = rng.uniform(margin, width - margin), rng.uniform(margin, height - margin)
        sprite = draw(pick_figure(rng, class_id), pick_pose(rng, class_id), light, (x, y, size))
        if canvas.fits(sprite):
            canvas.darken(sprite, (int(shadow[0] * size), int(shadow[1] * size)), strength)
            canvas.paint(sprite, class_id)
        if rng.random() < 0.3:
            clutter = draw_clutter(rng, photos, width, height, width * 0.5)
            if canvas.fits(clutter):
                canvas.paint(clutter, None)


def draw_scene(seed: int, index: int, backgrounds: Sequence[Image], size: int = 320) -> Scene:
    """Draw scene `index` of the set `seed`: BGR uint8 [size, size, 3] and its boxes.

    The same arguments give the same scene, whatever was drawn before.
    """
    rng = np.random.default_rng([seed, index])
    canvas = Canvas(draw_background(rng, backgrounds, size, size))
    _populate(rng, canvas, backgrounds)
    image = blur(rng, expose(rng, canvas.image))
    image = sense(rng, image, rng.uniform(0.0, 9.0))
    if rng.random() < 0.7:
        image = compress(image, int(rng.integers(35, 96)))
    return Scene(image, canvas.boxes())
