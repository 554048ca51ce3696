"""Network outputs become results: the table of decoders applied to one frame; and the inputs beside
the image that some decoders need.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.config import PreprocessConfig
from pipelines.decode_config import DecodeConfig, Finished
from pipelines.results import Decoded
from pipelines.stages.decoders.candidates import Outputs
from pipelines.stages.decoders.table import DECODERS
from pipelines.stages.view import View, view_of

__all__ = ["View", "decode", "view_of"]


def decode(outputs: Outputs, config: DecodeConfig, view: View) -> Decoded:
    """Return what the outputs of one inference say about the frame.

    Numbers that are NaN or infinite are no results; they are not worth a warning for each frame.
    """
    with np.errstate(all="ignore"):
        return DECODERS[type(config)].decode(outputs, config, view)


def constant_inputs(config: DecodeConfig, preprocess: PreprocessConfig) -> dict[str, NDArray[Any]]:
    """Return the inputs that are the same for every frame.

    `size_input` of `finished` takes the width and height in which the model shall give its boxes:
    those of the input, so that they are moved to the frame as all others.
    """
    if not isinstance(config, Finished) or not config.size_input:
        return {}
    return {config.size_input: np.array([[preprocess.width, preprocess.height]], np.int64)}
