"""Synthetic scenes for the demo detector: five kinds of objects drawn over real photographs.

Objects (`objects`) are turned, projected, shaded (`drawing`) and pasted (`canvas`) over a crop of
a photograph (`backgrounds`) among things of no class (`clutter`); light, blur, sensor noise and
JPEG artefacts come last (`camera`). Every scene is a function of (seed, index) alone, so a
training set, a calibration set and a held-out set are three numbers and not three archives. The
shipped pictures were drawn by this code: its output must not change by a byte.
"""

from toolkit.demo.scenes.backgrounds import HELD_OUT_PHOTOGRAPHS, load_backgrounds
from toolkit.demo.scenes.canvas import MIN_VISIBLE, Box
from toolkit.demo.scenes.moving import moving_scene
from toolkit.demo.scenes.objects import CLASSES
from toolkit.demo.scenes.scene import (
    CALIBRATION_SEED,
    HELD_OUT_SEED,
    OBJECT_SIZE,
    TRAIN_SEED,
    Scene,
    draw_scene,
)

__all__ = [
    "CALIBRATION_SEED",
    "CLASSES",
    "HELD_OUT_PHOTOGRAPHS",
    "HELD_OUT_SEED",
    "MIN_VISIBLE",
    "OBJECT_SIZE",
    "TRAIN_SEED",
    "Box",
    "Scene",
    "draw_scene",
    "load_backgrounds",
    "moving_scene",
]
