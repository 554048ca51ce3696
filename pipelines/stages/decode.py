"""Network outputs become results: the table of decoders applied to one frame."""

import numpy as np

from pipelines.decode_config import DecodeConfig
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
