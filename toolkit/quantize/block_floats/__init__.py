"""MXFP8 and NVFP4, for GPUs from SM 100 on: what they lose, and models that TensorRT reads.

formats    the numbers of a weight, and which products have both operands in them
functions  the operators of TensorRT for activations, written in those of ONNX
graph      writes them into a graph: for TensorRT, or to be run in floating point
"""
