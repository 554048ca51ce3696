"""Calibration pictures -> network input, through the pipeline's own preprocessing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from device.errors import SourceError
from pipelines.config import PreprocessConfig
from toolkit.errors import BuildError

Loader = Callable[[Path], "np.ndarray[Any, Any]"]


def picture_loader(
    shape: tuple[int | None, ...], preprocess: PreprocessConfig | None
) -> Loader | None:
    """Return a function from a picture's path to a float32 [1,3,H,W] input.

    None where the input is no picture (not [N,3,H,W]) and no preprocessing is given.

    Raises BuildError: the preprocessing makes another size than the input has.
    """
    config = preprocess or _default(shape)
    if config is None:
        return None
    if shape[2:] != (config.height, config.width):
        raise BuildError(
            f"The preprocessing makes pictures of {config.width}x{config.height}, but the model's "
            f"input has shape {list(shape)}; make width and height agree."
        )

    def load(path: Path) -> "np.ndarray[Any, Any]":
        from pipelines.preprocess import preprocess as prepare
        from pipelines.vision import cv2

        image = cv2.imread(str(path), cv2.IMREAD_COLOR)
        if image is None:
            raise SourceError(f"{path} is not a picture that OpenCV can read.")
        return prepare(image.astype(np.uint8, copy=False), config)[0]

    return load


def _default(shape: tuple[int | None, ...]) -> PreprocessConfig | None:
    if len(shape) != 4 or shape[1] != 3 or shape[2] is None or shape[3] is None:
        return None
    return PreprocessConfig(width=shape[3], height=shape[2])
