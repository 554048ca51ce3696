"""Synthetic scenes for the demo: five kinds of objects drawn over real photographs.

Objects (`objects`) are turned, projected, shaded (`drawing`) and pasted (`canvas`) over a
photograph (`backgrounds`), before which they move (`moving`). `scripts/training_scenes.py` draws
what the detector is trained on with them. The shipped pictures were drawn by this code: its output
must not change by a byte.
"""

from toolkit.demo.scenes.backgrounds import load_backgrounds
from toolkit.demo.scenes.moving import moving_scene

__all__ = ["load_backgrounds", "moving_scene"]
