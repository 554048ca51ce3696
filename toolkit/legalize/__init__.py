"""Rewrites that let nodes onto the DLA, each an equation, applied only where it does that.

`rows.py` is the table; a file each for the families. They run before calibration, for they make
tensors that need ranges, and change no result beyond float rounding. A dynamic batch is not frozen
here but by the import, which alone may change what a model takes.
"""

from toolkit.legalize.legalize import legalize, would_help
from toolkit.legalize.rewrite import Applied, Cut, Declined, Legalized, Rewrite
from toolkit.legalize.rows import REWRITES

__all__ = [
    "REWRITES",
    "Applied",
    "Cut",
    "Declined",
    "Legalized",
    "Rewrite",
    "legalize",
    "would_help",
]
