"""Segments through the TensorRT of this board: the only way to its DLA, and one to its GPU.

releases        which TensorRT takes which form of a segment, with which flags
board           what a finished plan depends on: versions, cores, power mode
messages        TensorRT's known refusals, as one sentence and a fix
layout          arrays to and from the DLA's memory formats
request         one segment to be finished: the values that pass to the child process
build           the child: ONNX -> TensorRT plan (build_dla, build_gpu, builder_calls)
compare         the child: the times of a plan for the GPU and of the segment's kernels
children        child processes with limits
plans           finished plans on disk, under everything that they depend on
prepare_engine  an engine -> its plans
__main__        `python -m device.runtime.tensorrt`: prepare from the command line
"""
