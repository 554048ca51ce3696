"""INT8 activation ranges from real data; knows arrays and names, never the graph.

`dataset` gives samples, `observer` watches tensors, `threshold` turns what was seen into one amax
per tensor, `calibrate` does the three in one pass, `table` keeps the result, and `compare` tells
how far a quantised output is from its reference.
"""

from calibration.calibrate import CalibrationResult, calibrate
from calibration.compare import Comparison, compare
from calibration.dataset import Dataset, InputSpec, Sample, memory_dataset, open_dataset
from calibration.errors import CalibrationError
from calibration.table import CalibrationTable, read_table, scale_of, write_table
from calibration.threshold import METHODS

__all__ = [
    "METHODS",
    "CalibrationError",
    "CalibrationResult",
    "CalibrationTable",
    "Comparison",
    "Dataset",
    "InputSpec",
    "Sample",
    "calibrate",
    "compare",
    "memory_dataset",
    "open_dataset",
    "read_table",
    "scale_of",
    "write_table",
]
