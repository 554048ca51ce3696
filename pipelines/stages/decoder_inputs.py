"""Inputs beside the image: constants that some models take."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.config import PreprocessConfig
from pipelines.decode_config import DecodeConfig, Finished


def constant_inputs(config: DecodeConfig, preprocess: PreprocessConfig) -> dict[str, NDArray[Any]]:
    """Return the inputs that are the same for every frame.

    `size_input` of `finished` takes the width and height in which the model shall give its boxes:
    those of the input, so that they are moved to the frame as all others.
    """
    if not isinstance(config, Finished) or not config.size_input:
        return {}
    return {config.size_input: np.array([[preprocess.width, preprocess.height]], np.int64)}
