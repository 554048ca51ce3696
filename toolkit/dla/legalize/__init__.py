"""Legalization: rewrites that let nodes onto the DLA, each an equation, applied only where it does.

`rows.py` is the table; a file each for the families. They run before calibration, for they make
tensors that need ranges, and change no result beyond float rounding. A dynamic batch is not frozen
here but by the import, which alone may change what a model takes.
"""
