"""Segments are finished on the board by its TensorRT: what `tandem-agent prepare` runs.

prepare_engine  an engine -> its plans
children        child processes with limits
build           the child: ONNX -> TensorRT plan (build_dla, build_gpu, builder_calls)
compare         the child: the times of a plan for the GPU and of the segment's kernels
__main__        `python -m device.runtime.prepare`: prepare from the command line
"""
