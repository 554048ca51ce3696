"""INT8 activation ranges from data; knows arrays and tensor names, never the graph.

calibrate         one pass over the data: samples -> histograms -> calibration table
dataset           samples from files; `arrays` reads .npy and .npz, `iterable` Python iterables
samples           the data set protocol, data sets in memory, batches
observer          mergeable histograms and exact extremes of tensors
state             histograms as a file that merges and resumes
threshold         the methods, histogram -> amax: `entropy`, `percentile`, `mse`
threshold_search  the threshold of least loss over the bins of a histogram
auto              chooses the range of each tensor by trials; `trials` counts and compares them
budget            the largest share of work in INT8 within an accuracy budget
least_loss        the nodes that are best in floating point, with at most a share of the work
channels          channels that are zero in every sample
table             the calibration table as a file
trt_cache         TensorRT calibration caches
compare           SQNR and cosine of two arrays; differences of two sets of ranges
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
