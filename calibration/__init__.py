"""INT8 activation ranges from real data; knows arrays and names, never the graph.

`dataset` gives samples, `observer` watches tensors, `threshold` turns what was seen into one amax
per tensor, `calibrate` does the three in one pass, `state` keeps and merges what was seen, `table`
keeps the result, `channels` counts what never leaves zero, and `compare` tells how far a quantised
output is from its reference.
"""

from calibration.calibrate import (
    CalibrationResult,
    Checkpoint,
    Observation,
    calibrate,
    observe_tensors,
)
from calibration.channels import ChannelWatch, DeadChannels
from calibration.compare import Comparison, compare
from calibration.dataset import (
    Dataset,
    InputSpec,
    Sample,
    iterable_dataset,
    memory_dataset,
    open_dataset,
)
from calibration.errors import CalibrationError
from calibration.state import State, merge_states, read_state, write_state
from calibration.table import Adjustments, CalibrationTable, read_table, scale_of, write_table
from calibration.threshold import METHODS, amax_by_method

__all__ = [
    "METHODS",
    "Adjustments",
    "CalibrationError",
    "CalibrationResult",
    "CalibrationTable",
    "ChannelWatch",
    "Checkpoint",
    "Comparison",
    "Dataset",
    "DeadChannels",
    "InputSpec",
    "Observation",
    "Sample",
    "State",
    "amax_by_method",
    "calibrate",
    "compare",
    "iterable_dataset",
    "memory_dataset",
    "merge_states",
    "observe_tensors",
    "open_dataset",
    "read_state",
    "read_table",
    "scale_of",
    "write_state",
    "write_table",
]
