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
compare           differences of two sets of ranges
"""
