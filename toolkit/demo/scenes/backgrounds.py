"""The photographs behind the objects."""

from pathlib import Path

import cv2
import numpy as np

from toolkit.demo.scenes.geometry import Image

# Photographs that no training or calibration scene ever shows; file stems.
HELD_OUT_PHOTOGRAPHS: tuple[str, ...] = ("camera", "china", "coffee")


def load_backgrounds(folder: Path, held_out: bool | None = None) -> list[Image]:
    """Read the photographs of a folder in the order of their names, BGR uint8.

    `held_out` True keeps only HELD_OUT_PHOTOGRAPHS, False all the others, None everything.

    Raises:
        FileNotFoundError: no such photograph is in the folder.
    """
    files = sorted(Path(folder).glob("*.jpg"))
    if held_out is not None:
        files = [f for f in files if (f.stem in HELD_OUT_PHOTOGRAPHS) == held_out]
    if not files:
        raise FileNotFoundError(f"{folder}: no photograph (*.jpg) to draw scenes over")
    return [np.asarray(cv2.imread(str(f), cv2.IMREAD_COLOR), np.uint8) for f in files]
